// Memory that the host and a CUDA device both reach, in the place of the heap: tests of single kernels hand
// them what their vectors hold, as the emulator allows. Linked by device/*_test (tests/on_device.sh).
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <memory_resource>
#include <new>

namespace {

constexpr size_t kBytes = size_t(2) << 30, kAlign = 256;  // as cudaMalloc aligns

std::byte* managed() {
    void* all = nullptr;
    const cudaError_t result = cudaMallocManaged(&all, kBytes);
    if (result != cudaSuccess)
        std::fprintf(stderr, "managed memory: %s\n", cudaGetErrorString(result)), std::exit(1);
    return static_cast<std::byte*>(all);
}

std::byte* begin = nullptr;  // none: main() has not begun, and the heap is the usual one

std::pmr::memory_resource& pool() {
    static std::pmr::monotonic_buffer_resource all(begin, kBytes, std::pmr::null_memory_resource());
    static std::pmr::synchronized_pool_resource pool({.largest_required_pool_block = 64 << 20}, &all);
    return pool;
}

/// The size is kept before what is allocated.
void* allocate(size_t bytes) {
    bytes += kAlign;
    std::byte* const at =
        static_cast<std::byte*>(begin ? pool().allocate(bytes, kAlign)
                                      : std::aligned_alloc(kAlign, (bytes + kAlign - 1) / kAlign * kAlign));
    if (!at) throw std::bad_alloc();
    *reinterpret_cast<size_t*>(at) = bytes;
    return at + kAlign;
}

void release(void* p) {
    if (!p) return;
    std::byte* const at = static_cast<std::byte*>(p) - kAlign;
    if (begin && at >= begin && at < begin + kBytes)
        pool().deallocate(at, *reinterpret_cast<size_t*>(at), kAlign);
    else
        std::free(at);
}

const bool started = (begin = managed()) != nullptr;

}  // namespace

void* operator new(size_t bytes) { return allocate(bytes); }
void* operator new[](size_t bytes) { return allocate(bytes); }
void* operator new(size_t bytes, std::align_val_t) { return allocate(bytes); }
void* operator new[](size_t bytes, std::align_val_t) { return allocate(bytes); }
void operator delete(void* p) noexcept { release(p); }
void operator delete[](void* p) noexcept { release(p); }
void operator delete(void* p, size_t) noexcept { release(p); }
void operator delete[](void* p, size_t) noexcept { release(p); }
void operator delete(void* p, std::align_val_t) noexcept { release(p); }
void operator delete[](void* p, std::align_val_t) noexcept { release(p); }
void operator delete(void* p, size_t, std::align_val_t) noexcept { release(p); }
void operator delete[](void* p, size_t, std::align_val_t) noexcept { release(p); }
