// One CUDA device, and how a kernel is started on it.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <string>
#include <utility>

namespace slimrt::cuda {

/// Throws Error{device} that says what was being done.
void check(cudaError_t result, const char* what);

struct Device {
    int id = 0;
    int capability = 0;       // 90: sm_90
    int processors = 0;       // streaming multiprocessors
    size_t shared_bytes = 0;  // that one block may have
    size_t l2_bytes = 0;
    std::string name;
    cudaStream_t stream = nullptr;  // none: planning
};

struct Shape {
    dim3 grid, block;
    size_t shared_bytes = 0;  // dynamic
    unsigned cluster = 1;     // blocks of a cluster, along x
};

/// Lets a kernel have so much dynamic shared memory and, if `large_cluster`, clusters of more than 8 blocks.
/// Never less again: other threads and recorded steps start the same kernel. Throws Error{device}.
void allow(int device, const void* kernel, size_t shared_bytes, bool large_cluster);

/// Starts a kernel on the device's stream. Throws Error{device}.
template <class... Params, class... Args>
void launch(const Device& device, void (*kernel)(Params...), const Shape& shape, Args&&... args) {
    constexpr size_t kUnasked = 40 << 10, kPortableCluster = 8;  // 48 KB less static shared memory
    const bool large_cluster = shape.cluster > kPortableCluster;
    if (shape.shared_bytes > kUnasked || large_cluster)
        allow(device.id, reinterpret_cast<const void*>(kernel), shape.shared_bytes, large_cluster);
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = shape.cluster;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = shape.grid;
    config.blockDim = shape.block;
    config.dynamicSmemBytes = shape.shared_bytes;
    config.stream = device.stream;
    config.attrs = &cluster;
    config.numAttrs = shape.cluster > 1 ? 1 : 0;
    check(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...), "starting a kernel");
}

}  // namespace slimrt::cuda
