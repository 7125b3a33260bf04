#include "kernels/cuda/memory.h"

#include "core/error.h"
#include "core/memory_info.h"
#include "core/sizes.h"

namespace slimrt::cuda {
namespace {

constexpr size_t kAlign = 256, kSlab = size_t(4) << 20, kSmall = size_t(1) << 19;

size_t aligned(size_t bytes) { return (std::max<size_t>(bytes, 1) + kAlign - 1) / kAlign * kAlign; }

uint64_t& count_of(MemoryUse& use, MemoryKind kind) {
    uint64_t* const counts[] = {&use.weights, &use.derived, &use.cache, &use.scratch};
    return *counts[static_cast<int>(kind)];
}

}  // namespace

DeviceMemory memory_of(const Device& device) {
    size_t available = 0, total = 0;
    check(cudaMemGetInfo(&available, &total), "asking for the free memory");
    // Of memory that it shares with the host, CUDA counts as used what files are cached in.
    const uint64_t of_host = device.integrated ? available_memory() : 0;  // 0: unknown
    return {of_host ? std::min<uint64_t>(of_host, total) : available, total};
}

Buffer Memory::alloc(MemoryKind kind, size_t bytes, const char* what) {
    const std::shared_ptr<std::byte> data = take(aligned(bytes), what);
    count_of(*used_, kind) += bytes;
    // The same address, with an owner that also counts: a slab has many buffers.
    const auto give_back = [data, used = used_, kind, bytes](std::byte*) { count_of(*used, kind) -= bytes; };
    return {std::shared_ptr<std::byte>(data.get(), give_back), bytes};
}

std::shared_ptr<std::byte> Memory::take(size_t bytes, const char* what) {
    if (!device_.stream) {
        const uintptr_t address = next_;
        next_ += bytes;
        return {reinterpret_cast<std::byte*>(address), [](std::byte*) {}};
    }
    if (bytes > kSmall) return take_whole(bytes, what);
    if (!slab_ || slab_used_ + bytes > kSlab) {
        slab_ = take_whole(kSlab, what);
        slab_used_ = 0;
    }
    slab_used_ += bytes;
    return {slab_, slab_.get() + slab_used_ - bytes};
}

std::shared_ptr<std::byte> Memory::take_whole(size_t bytes, const char* what) const {
    void* data = nullptr;
    if (const cudaError_t result = cudaMalloc(&data, bytes); result == cudaErrorMemoryAllocation) {
        cudaGetLastError();  // this error is reported below
        const uint64_t available = memory_of(device_).available;
        const auto [needed, there] = format_both(bytes, available);
        const char* why = bytes > available ? "" : "which the driver does not give, though ";
        throw Error(
            ErrorCode::wont_fit,
            concat(what, " needs ", needed, " of memory on ", device_.name, ", ", why, there, " are free"),
            bytes, available);
    } else {
        check(result, "allocating memory");
    }
    const std::shared_ptr<std::byte> owner(static_cast<std::byte*>(data), [](std::byte* p) { cudaFree(p); });
    check(cudaMemsetAsync(data, 0, bytes, device_.stream), "clearing memory");
    return owner;
}

}  // namespace slimrt::cuda
