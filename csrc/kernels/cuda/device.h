// One CUDA device, and how a kernel is started on it.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <string>
#include <utility>

namespace slimrt::cuda {

/// Throws Error{device} that says what failed.
void check(cudaError_t result, const char* what);

inline constexpr int kMaxCluster = 16;

/// What plans are made of: later they ask nothing of the device.
struct Device {
    int id = 0;
    int capability = 0;       // 90: sm_90
    int processors = 0;       // streaming multiprocessors
    size_t shared_bytes = 0;  // the most that a block may have
    size_t l2_bytes = 0;
    size_t window_bytes = 0;  // the largest access policy window of a launch
    std::array<int, kMaxCluster + 1>
        clusters{};           // by size: how many run at once, with a multiprocessor for each block
    bool overlaps = false;    // kernels may begin while the previous one ends
    bool integrated = false;  // its memory is the host's
    std::string name;
    cudaStream_t stream = nullptr;  // none: planning
};

/// Makes a device current in this thread as long as it lives, then the previous one again (PyTorch's, say).
class Current {
  public:
    explicit Current(int device, bool real = true) : real_(real) {
        check(cudaGetDevice(&before_), "asking for the current device");
        if (before_ != device) check(cudaSetDevice(device), "choosing the device");
        changed_ = before_ != device;
    }
    ~Current() {
        if (changed_) cudaSetDevice(before_);
    }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
    explicit operator bool() const { return real_; }

  private:
    int before_ = 0;
    bool real_, changed_ = false;
};

struct Shape {
    dim3 grid, block;
    size_t shared_bytes = 0;                // dynamic
    unsigned cluster = 0;                   // blocks of a cluster, along x; 0: none, and no st.async
    bool cooperative = false;               // all blocks run at once, or the launch fails
    bool early = false;                     // calls wait_for_previous() (ptx.cuh), so that it may begin early
    std::span<const unsigned char> once{};  // memory that is read once and need not stay in L2
};

/// Allows a kernel so much dynamic shared memory and, if `large_cluster`, clusters of more than 8 blocks.
/// Limits only grow, since other threads and recorded steps start the same kernel. Throws Error{device}.
void allow(int device, const void* kernel, size_t shared_bytes, bool large_cluster);

/// Starts a kernel on the device's stream. Throws Error{device}.
template <class... Params, class... Args>
void launch(const Device& device, void (*kernel)(Params...), const Shape& shape, Args&&... args) {
    constexpr size_t kUnasked = 40 << 10, kPortableCluster = 8;  // 48 KB less static shared memory
    const bool large_cluster = shape.cluster > kPortableCluster;
    if (shape.shared_bytes > kUnasked || large_cluster)
        allow(device.id, reinterpret_cast<const void*>(kernel), shape.shared_bytes, large_cluster);
    cudaLaunchAttribute attributes[3]{};
    unsigned n = 0;
    if (shape.cooperative) {
        attributes[n].id = cudaLaunchAttributeCooperative;
        attributes[n++].val.cooperative = 1;
    } else if (shape.cluster > 0) {
        attributes[n].id = cudaLaunchAttributeClusterDimension;
        attributes[n++].val.clusterDim = {shape.cluster, 1, 1};
    }
    if (shape.early && device.overlaps) {
        attributes[n].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[n++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (const size_t bytes = std::min(shape.once.size(), device.window_bytes)) {
        attributes[n].id = cudaLaunchAttributeAccessPolicyWindow;
        attributes[n++].val.accessPolicyWindow = {.base_ptr = const_cast<unsigned char*>(shape.once.data()),
                                                  .num_bytes = bytes,
                                                  .hitRatio = 1,
                                                  .hitProp = cudaAccessPropertyStreaming,
                                                  .missProp = cudaAccessPropertyNormal};
    }
    cudaLaunchConfig_t config{};
    config.gridDim = shape.grid;
    config.blockDim = shape.block;
    config.dynamicSmemBytes = shape.shared_bytes;
    config.stream = device.stream;
    config.attrs = attributes;
    config.numAttrs = n;
    check(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...), "starting a kernel");
}

}  // namespace slimrt::cuda
