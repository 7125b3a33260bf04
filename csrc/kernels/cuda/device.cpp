#include "kernels/cuda/device.h"

#include "core/error.h"
#include "kernels/cuda/absorbed.h"
#include "kernels/cuda/cuda_backend.h"

namespace slimrt {
namespace cuda {

void check(cudaError_t result, const char* what) {
    if (result == cudaSuccess) return;
    cudaGetLastError();
    const char* const advice =
        result == cudaErrorInitializationError
            ? "; if this process was forked from one that used the GPU, it cannot: load the model after the "
              "fork, or start processes by \"spawn\""
            : "";
    fail(ErrorCode::device, "CUDA failed at ", what, ": ", cudaGetErrorString(result), " (",
         cudaGetErrorName(result), ")", advice);
}

namespace {

constexpr int kMinCapability = 80;

Device describe(int id) {
    cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, id), "asking for a device's properties");
    return {.id = id,
            .capability = 10 * properties.major + properties.minor,
            .processors = properties.multiProcessorCount,
            .shared_bytes = properties.sharedMemPerBlockOptin,
            .l2_bytes = static_cast<size_t>(properties.l2CacheSize),
            .name = properties.name};
}

/// Why there is no device. Without any driver the runtime speaks of one that is too old.
std::string why_no_device(cudaError_t result) {
    int driver = 0;
    if (result == cudaErrorInsufficientDriver && cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0)
        return "no NVIDIA driver is installed";
    return result == cudaSuccess ? "no device" : cudaGetErrorString(result);
}

}  // namespace
}  // namespace cuda

std::vector<std::string> cuda_devices(std::string* why_none) {
    int n = 0;
    const cudaError_t result = cudaGetDeviceCount(&n);
    std::vector<std::string> names;
    if (result != cudaSuccess) {
        cudaGetLastError();
        n = 0;
    }
    for (int id = 0; id < n; ++id) names.push_back(cuda::describe(id).name);
    if (why_none) *why_none = n == 0 ? cuda::why_no_device(result) : "";
    return names;
}

std::unique_ptr<Backend> open_cuda_backend(int id, bool dry) {
    std::string why;
    const int n = static_cast<int>(cuda_devices(&why).size());
    if (id < 0 || id >= n)
        fail(ErrorCode::unsupported, "there is no CUDA device ", id, n == 0 ? concat(" (", why, ")") : "",
             "; slimrt doctor shows what there is");
    cuda::Device device = cuda::describe(id);
    if (device.capability < cuda::kMinCapability)
        fail(ErrorCode::unsupported, device.name, " has compute capability ", device.capability / 10, ".",
             device.capability % 10, ", slimrt needs 8.0 or newer");
    const cuda::Current current(id);
    cuda::ask_for_clusters(device);
    return std::make_unique<cuda::CudaBackend>(std::move(device), dry);
}

}  // namespace slimrt
