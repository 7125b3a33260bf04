// Memory that the host and a CUDA device both reach, in the place of the heap: tests of single kernels hand
// them what their vectors hold, as the emulator allows. For tests/on_device.sh.
#include <cuda_runtime.h>

#include <bit>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <utility>

namespace {

constexpr size_t kBytes = size_t(4) << 30, kAlign = 256;  // as cudaMalloc aligns

std::byte* managed() {
    void* all = nullptr;
    const cudaError_t result = cudaMallocManaged(&all, kBytes);
    if (result != cudaSuccess)
        std::fprintf(stderr, "managed memory: %s\n", cudaGetErrorString(result)), std::exit(1);
    return static_cast<std::byte*>(all);
}

std::byte* begin = nullptr;  // none: main() has not begun, and the heap is the usual one

std::byte* end = nullptr;  // of what was taken so far
std::mutex mutex;

/// Pieces of 2^i bytes: those that were freed, the first of which knows the next one.
std::byte* freed[40];

/// A piece, which has i written before what is allocated.
void* allocate(size_t bytes) {
    const int i = std::bit_width(bytes + kAlign - 1);
    const size_t size = size_t(1) << i;
    std::byte* at;
    if (!begin) {
        at = static_cast<std::byte*>(std::aligned_alloc(kAlign, size));
    } else {
        const std::lock_guard lock(mutex);
        at = freed[i];
        if (at)
            std::memcpy(&freed[i], at, sizeof at);
        else if (size <= size_t(begin + kBytes - end))
            at = std::exchange(end, end + size);
    }
    if (!at) throw std::bad_alloc();
    at[kAlign - 1] = std::byte(i);
    return at + kAlign;
}

void release(void* p) {
    if (!p) return;
    std::byte* const at = static_cast<std::byte*>(p) - kAlign;
    if (!begin || at < begin || at >= begin + kBytes) return std::free(at);
    const std::lock_guard lock(mutex);
    const int i = int(at[kAlign - 1]);
    std::memcpy(at, &freed[i], sizeof at);
    freed[i] = at;
}

const bool started = (begin = end = managed()) != nullptr;

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
