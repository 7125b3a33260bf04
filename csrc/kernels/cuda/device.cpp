#include "kernels/cuda/device.h"

#include <algorithm>
#include <vector>

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

constexpr int kMinCapability = 80, kTegra = 87;
constexpr int kRecordsOverlaps = 12030;  // a driver's version
constexpr int kOverlaps = 90;            // its kernels wait for the previous one; the PTX of sm_80 does not
const std::vector<int> kCode = {SLIMRT_CUDA_CODE};  // what nvcc has compiled for

Device describe(int id) {
    cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, id), "asking for a device's properties");
    return {.id = id,
            .capability = 10 * properties.major + properties.minor,
            .processors = properties.multiProcessorCount,
            .shared_bytes = properties.sharedMemPerBlockOptin,
            .l2_bytes = static_cast<size_t>(properties.l2CacheSize),
            .window_bytes = static_cast<size_t>(properties.accessPolicyMaxWindowSize),
            .integrated = properties.integrated != 0,
            .name = properties.name};
}

/// Whether compiled code runs on it: code for an earlier minor version does, but on Tegra. Else the driver
/// compiles PTX.
bool has_code(int capability) {
    return kCode.empty() || std::ranges::any_of(kCode, [&](int code) {
               return code / 10 == capability / 10 && code <= capability &&
                      (code == capability || capability != kTegra);
           });
}

/// Why there is no device. Without any driver the runtime reports one that is too old.
std::string why_no_device(cudaError_t result) {
    int driver = 0;
    if (result == cudaErrorInsufficientDriver && cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0)
        return "no NVIDIA driver is installed";
    return result == cudaSuccess ? "no device" : cudaGetErrorString(result);
}

}  // namespace
}  // namespace cuda

// Where there are devices, `why_none` says whose kernels are yet to be compiled, if any.
std::vector<std::string> cuda_devices(std::string* why_none) {
    int n = 0;
    const cudaError_t result = cudaGetDeviceCount(&n);
    std::vector<std::string> names;
    if (result != cudaSuccess) {
        cudaGetLastError();
        n = 0;
    }
    std::string said = n == 0 ? cuda::why_no_device(result) : "";
    for (int id = 0; id < n; ++id) {
        const cuda::Device device = cuda::describe(id);
        names.push_back(device.name);
        if (device.capability >= cuda::kMinCapability && !cuda::has_code(device.capability))
            said = concat("kernels for ", device.name,
                          " are compiled by the driver when they first start, once: that may take minutes");
    }
    if (why_none) *why_none = said;
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
    int driver = 0;
    cuda::check(cudaDriverGetVersion(&driver), "asking for the driver's version");
    device.overlaps = device.capability >= cuda::kOverlaps && cuda::has_code(device.capability) &&
                      driver >= cuda::kRecordsOverlaps;
    cuda::ask_for_clusters(device);
    return std::make_unique<cuda::CudaBackend>(std::move(device), dry);
}

}  // namespace slimrt
