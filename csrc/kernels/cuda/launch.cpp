#include <map>
#include <mutex>
#include <utility>

#include "kernels/cuda/device.h"

namespace slimrt::cuda {

void allow(int device, const void* kernel, size_t shared_bytes, bool large_cluster) {
    struct Allowed {
        size_t shared_bytes = 0;
        bool large_cluster = false;
    };
    static std::mutex mutex;
    static std::map<std::pair<int, const void*>, Allowed> all;
    const std::lock_guard lock(mutex);
    Allowed& so_far = all[{device, kernel}];
    if (shared_bytes > so_far.shared_bytes) {
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   static_cast<int>(shared_bytes)),
              "asking for shared memory");
        so_far.shared_bytes = shared_bytes;
    }
    if (large_cluster && !so_far.large_cluster) {
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
              "asking for a large cluster");
        so_far.large_cluster = true;
    }
}

}  // namespace slimrt::cuda
