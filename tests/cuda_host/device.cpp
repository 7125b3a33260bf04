// The device, its limits, and how kernels are started on it.
#include <algorithm>
#include <cstdlib>
#include <map>

#include "cuda_host_runtime.h"

using namespace cuda_host;

namespace {

constexpr size_t kUsualShared = 48 << 10, kDefaultMemory = size_t{4} << 30;
constexpr unsigned kMostThreads = 1024, kMostGridYZ = 65535, kPortableCluster = 8, kLargestCluster = 16;

/// A kernel's static shared memory, which nobody knows here, is part of what it has unasked.
constexpr size_t kMostStatic = 8 << 10;

struct KernelLimits {
    size_t shared_bytes = kUsualShared - kMostStatic;
    unsigned cluster = kPortableCluster;
};

std::map<std::pair<int, const void*>, KernelLimits> limits;  // of each device
thread_local cudaError_t last_error = cudaSuccess;

size_t from_environment(const char* name, size_t otherwise) {
    const char* const text = std::getenv(name);
    return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

int n_devices() { return int(from_environment("SLIMRT_EMULATED_DEVICES", 1)); }

size_t most_shared(int capability) {
    return capability == 90 ? 227 << 10 : capability == 80 ? 163 << 10 : 99 << 10;
}

}  // namespace

cudaError_t cuda_host::result(cudaError_t error) {
    if (error != cudaSuccess) last_error = error;
    return error;
}

RefusedGraphs cuda_host::refused_graphs() {
    return RefusedGraphs(from_environment("SLIMRT_EMULATED_NO_GRAPHS", 0));
}
bool cuda_host::is_integrated() { return from_environment("SLIMRT_EMULATED_INTEGRATED", 0) != 0; }
size_t cuda_host::total_memory() { return from_environment("SLIMRT_EMULATED_MEMORY", kDefaultMemory); }

const char* cudaGetErrorName(cudaError_t error) {
    switch (error) {
        case cudaSuccess:
            return "cudaSuccess";
        case cudaErrorInvalidValue:
            return "cudaErrorInvalidValue";
        case cudaErrorMemoryAllocation:
            return "cudaErrorMemoryAllocation";
        case cudaErrorInitializationError:
            return "cudaErrorInitializationError";
        case cudaErrorInvalidConfiguration:
            return "cudaErrorInvalidConfiguration";
        case cudaErrorInsufficientDriver:
            return "cudaErrorInsufficientDriver";
        case cudaErrorNoDevice:
            return "cudaErrorNoDevice";
        case cudaErrorInvalidDevice:
            return "cudaErrorInvalidDevice";
        case cudaErrorInvalidResourceHandle:
            return "cudaErrorInvalidResourceHandle";
        case cudaErrorNotReady:
            return "cudaErrorNotReady";
        case cudaErrorStreamCaptureUnsupported:
            return "cudaErrorStreamCaptureUnsupported";
        case cudaErrorStreamCaptureInvalidated:
            return "cudaErrorStreamCaptureInvalidated";
    }
    return "unrecognized error code";
}
const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }

cudaError_t cudaGetDeviceCount(int* count) { return *count = n_devices(), cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= n_devices()) return result(cudaErrorInvalidDevice);
    return current_device = device, cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) { return *device = current_device, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) {
    return *version = int(from_environment("SLIMRT_EMULATED_DRIVER", 13000)), cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = 13000, cudaSuccess; }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
    if (device < 0 || device >= n_devices()) return result(cudaErrorInvalidDevice);
    const int capability = int(from_environment("SLIMRT_EMULATED_CAPABILITY", 90));
    *properties = {.name = "emulated",
                   .totalGlobalMem = total_memory(),
                   .sharedMemPerBlock = kUsualShared,
                   .sharedMemPerBlockOptin = most_shared(capability),
                   .sharedMemPerMultiprocessor = 228 << 10,
                   .integrated = is_integrated(),
                   .major = capability / 10,
                   .minor = capability % 10,
                   .multiProcessorCount = int(from_environment("SLIMRT_EMULATED_PROCESSORS", 4)),
                   .l2CacheSize = 8 << 20,
                   .accessPolicyMaxWindowSize = 16 << 20,
                   .maxThreadsPerBlock = kMostThreads,
                   .warpSize = warpSize};
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    cudaDeviceProp all_of_it;
    if (cudaGetDeviceProperties(&all_of_it, device) != cudaSuccess) return last_error;
    switch (attribute) {
        case cudaDevAttrMaxThreadsPerBlock:
            return *value = all_of_it.maxThreadsPerBlock, cudaSuccess;
        case cudaDevAttrMaxSharedMemoryPerBlock:
            return *value = int(all_of_it.sharedMemPerBlock), cudaSuccess;
        case cudaDevAttrMultiProcessorCount:
            return *value = all_of_it.multiProcessorCount, cudaSuccess;
        case cudaDevAttrL2CacheSize:
            return *value = all_of_it.l2CacheSize, cudaSuccess;
        case cudaDevAttrComputeCapabilityMajor:
            return *value = all_of_it.major, cudaSuccess;
        case cudaDevAttrComputeCapabilityMinor:
            return *value = all_of_it.minor, cudaSuccess;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
            return *value = int(all_of_it.sharedMemPerMultiprocessor), cudaSuccess;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin:
            return *value = int(all_of_it.sharedMemPerBlockOptin), cudaSuccess;
    }
    return result(cudaErrorInvalidValue);
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
    const Lock lock(all);
    KernelLimits& of = limits[{current_device, kernel}];
    cudaDeviceProp device;
    cudaGetDeviceProperties(&device, 0);
    if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
        if (value < 0 || size_t(value) > device.sharedMemPerBlockOptin) return result(cudaErrorInvalidValue);
        of.shared_bytes = size_t(value);
    }
    if (attribute == cudaFuncAttributeNonPortableClusterSizeAllowed)
        of.cluster = value ? kLargestCluster : kPortableCluster;
    return cudaSuccess;
}

/// The processors of the device are one group, or SLIMRT_EMULATED_GROUP of them are.
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void*, const cudaLaunchConfig_t* config) {
    cudaDeviceProp device;
    cudaGetDeviceProperties(&device, 0);
    const int all = device.multiProcessorCount, size = int(config->attrs[0].val.clusterDim.x);
    const int group = int(from_environment("SLIMRT_EMULATED_GROUP", size_t(all)));
    return *clusters = all / group * (group / size), cudaSuccess;
}

cudaError_t cuda_host::launch(const cudaLaunchConfig_t& config, const void* kernel,
                              std::function<void()> thread) {
    const Lock lock(all);
    cudaDeviceProp device;
    cudaGetDeviceProperties(&device, 0);
    Launch launch{config.gridDim, config.blockDim, 1, config.dynamicSmemBytes, std::move(thread)};
    for (unsigned i = 0; i < config.numAttrs; ++i) {
        if (config.attrs[i].id == cudaLaunchAttributeCooperative) {
            launch.cooperative = config.attrs[i].val.cooperative != 0;
            continue;
        }
        if (config.attrs[i].id == cudaLaunchAttributeProgrammaticStreamSerialization) {
            launch.early = config.attrs[i].val.programmaticStreamSerializationAllowed != 0;
            continue;
        }
        if (config.attrs[i].id == cudaLaunchAttributeAccessPolicyWindow) {
            const cudaAccessPolicyWindow& window = config.attrs[i].val.accessPolicyWindow;
            if (window.num_bytes > size_t(device.accessPolicyMaxWindowSize) || !(window.hitRatio <= 1))
                return result(cudaErrorInvalidValue);
            continue;  // there are no caches here
        }
        const auto& cluster = config.attrs[i].val.clusterDim;
        if (cluster.y != 1 || cluster.z != 1) return result(cudaErrorInvalidValue);
        launch.cluster = cluster.x;
    }
    last_launch = config;
    last_launch.attrs = nullptr, last_launch.numAttrs = 0;
    const dim3 grid = launch.grid, block = launch.block;
    const uint64_t threads = uint64_t{block.x} * block.y * block.z;
    if (threads == 0 || threads > kMostThreads || block.z > 64 || grid.x == 0 || grid.x > 0x7fffffff ||
        grid.y == 0 || grid.y > kMostGridYZ || grid.z == 0 || grid.z > kMostGridYZ)
        return result(cudaErrorInvalidConfiguration);
    const KernelLimits& of = limits[{current_device, kernel}];
    if (launch.shared_bytes > of.shared_bytes || launch.cluster == 0 || launch.cluster > of.cluster ||
        grid.x % launch.cluster != 0)
        return result(cudaErrorInvalidValue);
    const bool early = launch.early;
    const auto work = [launch = std::move(launch)] {
        ++n_started;
        run(launch);
    };
    return enqueue(config.stream, work, early);
}

// For tests/test_cuda_launches.py.
extern "C" [[gnu::visibility("default")]] uint64_t slimrt_emulated_launches() {
    const Lock lock(all);
    return n_started;
}
extern "C" [[gnu::visibility("default")]] uint64_t slimrt_emulated_uploads() {
    const Lock lock(all);
    return n_uploads;
}
extern "C" [[gnu::visibility("default")]] uint64_t slimrt_emulated_bytes_down() {
    const Lock lock(all);
    return n_bytes_down;
}
