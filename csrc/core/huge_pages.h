#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace slimrt {

inline constexpr size_t kHugePage = size_t(2) << 20;

/// Maps zeroed memory that starts at a huge page boundary if it is as large as one; MAP_FAILED if there is no
/// memory.
inline void* map_zeros(size_t bytes, int protection, int flags) {
    void* wanted = nullptr;
    if (bytes >= kHugePage) {
        void* const space =
            ::mmap(nullptr, bytes + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (space != MAP_FAILED) {
            const auto at = reinterpret_cast<uintptr_t>(space);
            wanted = reinterpret_cast<void*>((at + kHugePage - 1) / kHugePage * kHugePage);
            ::munmap(space, bytes + kHugePage);
        }
    }
    flags |= MAP_PRIVATE | MAP_ANONYMOUS;
    return ::mmap(wanted, bytes, protection, flags, -1, 0);  // elsewhere, if that address was taken meanwhile
}

// Hints to the kernel, on Linux only.

inline void wish_for_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] size_t bytes) {
#ifdef MADV_HUGEPAGE
    ::madvise(data, bytes, MADV_HUGEPAGE);
#endif
}

inline void refuse_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] size_t bytes) {
#ifdef MADV_NOHUGEPAGE
    ::madvise(data, bytes, MADV_NOHUGEPAGE);
#endif
}

}  // namespace slimrt
