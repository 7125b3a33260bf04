#pragma once

#include <sys/mman.h>

#include <cstddef>

namespace slimrt {

// Only wishes, and only on Linux.

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
