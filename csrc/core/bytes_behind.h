// With AddressSanitizer, which does not know of mmap: a poisoned page behind mapped memory, so that reads
// past the end are found.
#pragma once

#include <cstddef>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace slimrt {

#ifdef __SANITIZE_ADDRESS__
inline constexpr size_t kBytesBehind = 4096;
inline void forbid(const std::byte* data, size_t bytes) { __asan_poison_memory_region(data, bytes); }
/// Unpoisons memory before it is unmapped, since others may map it then.
inline void allow(const std::byte* data, size_t bytes) { __asan_unpoison_memory_region(data, bytes); }
#else
inline constexpr size_t kBytesBehind = 0;
inline void forbid(const std::byte*, size_t) {}
inline void allow(const std::byte*, size_t) {}
#endif

}  // namespace slimrt
