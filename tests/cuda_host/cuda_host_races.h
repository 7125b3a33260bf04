// What ThreadSanitizer is told so that it finds races between the threads of a kernel (tests/races.sh). Where
// kernels are not built with it none of these functions is there, and nothing is done.
#pragma once

#include <cstddef>

extern "C" {
[[gnu::weak]] void* __tsan_get_current_fiber();
[[gnu::weak]] void* __tsan_create_fiber(unsigned flags);
[[gnu::weak]] void __tsan_switch_to_fiber(void* fiber, unsigned flags);
[[gnu::weak]] void __tsan_acquire(void* at);
[[gnu::weak]] void __tsan_release(void* at);
[[gnu::weak]] void __tsan_read_range(void* p, unsigned long bytes);
[[gnu::weak]] void __tsan_write_range(void* p, unsigned long bytes);
[[gnu::weak]] void __tsan_ignore_thread_begin();
[[gnu::weak]] void __tsan_ignore_thread_end();
}

namespace cuda_host::races {

inline bool are_found() { return __tsan_switch_to_fiber != nullptr; }

/// All that this thread has done comes before what others do after ordered_after() of the same address.
inline void ordered_before(const void* at) {
    if (are_found()) __tsan_release(const_cast<void*>(at));
}
inline void ordered_after(const void* at) {
    if (are_found()) __tsan_acquire(const_cast<void*>(at));
}

/// Accesses that the emulator makes for this thread.
inline void reads(const void* p, size_t bytes) {
    if (are_found()) __tsan_read_range(const_cast<void*>(p), bytes);
}
inline void writes(void* p, size_t bytes) {
    if (are_found()) __tsan_write_range(p, bytes);
}

/// Somebody who makes accesses, ordered after what this thread has done.
inline void* make_thread() { return are_found() ? __tsan_create_fiber(0) : nullptr; }
inline void* this_thread() { return are_found() ? __tsan_get_current_fiber() : nullptr; }
/// From now on accesses are made by another thread; this orders nothing.
inline void become(void* thread) {
    constexpr unsigned kOrdersNothing = 1;
    if (are_found()) __tsan_switch_to_fiber(thread, kOrdersNothing);
}

/// While it lives, accesses of this thread are the emulator's own, which are not looked at.
struct Unwatched {
    Unwatched() {
        if (are_found()) __tsan_ignore_thread_begin();
    }
    ~Unwatched() {
        if (are_found()) __tsan_ignore_thread_end();
    }
    Unwatched(const Unwatched&) = delete;
};

}  // namespace cuda_host::races
