// How memory that is read once is called for before it is needed: which way is fast differs from CPU to CPU.
// It changes how long a result takes, never its bits.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace slimrt::cpu {

/// Into all caches, past the first level, or past all but the first; or left to the CPU.
enum class Hint : uint8_t { none, t0, t1, nta };

struct Access {
    Hint hint = Hint::none;
    bool several = false;  // rows of weights side by side, as many streams, where they are
    int32_t ahead = 0;     // bytes from where memory is called for to where it is read

    bool operator==(const Access&) const = default;
};

/// Where the first of R rows calls for memory that are read side by side, R at a time: `ahead` bytes further
/// in the order of reading.
template <int R>
class PrefetchTarget {
  public:
    PrefetchTarget(const uint8_t* row, size_t stride, Access access) : skip_((R - 1) * stride) {
        const size_t each = static_cast<size_t>(access.ahead) / R, rows = each / stride;
        near_ = row + rows * R * stride + each % stride;
        wrap_ = stride - each % stride;
    }
    /// At so many bytes of the row.
    const uint8_t* at(size_t bytes) const { return near_ + bytes + (R > 1 && bytes >= wrap_ ? skip_ : 0); }

  private:
    const uint8_t* near_;
    size_t wrap_, skip_;
};

/// Calls for the cache lines of [at, at + bytes), which need not exist. Where t0 is usual it is asked about
/// first: in NEON's loops of plain weights each further test is a twentieth.
template <bool usually_t0 = false>
[[gnu::always_inline]] static inline void prefetch(const void* at, int64_t bytes, Hint hint) {
    const uint8_t* const p = static_cast<const uint8_t*>(at);
    constexpr int kLine = 64;
    // Where it is not a constant it is tested here: three copies of the loop around would be no faster.
    if (!__builtin_constant_p(hint)) asm("" : "+r"(hint));
    if (usually_t0 ? __builtin_expect(hint == Hint::t0, true) : hint == Hint::t0)
        for (int64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(p + i, 0, 3);
    else if (hint == Hint::nta)
        for (int64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(p + i, 0, 0);
    else if (hint == Hint::t1)
        for (int64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(p + i, 0, 2);
}

/// Memory that is called for in steps: once a CPU waits for as many lines as it can (Zen 4: 24) it drops what
/// else is called for, or waits before it does anything else.
struct PrefetchSteps {
    const char* at = nullptr;
    int64_t bytes = 0;  // a step; 0: nothing is called for
    Hint hint = Hint::t0;

    [[gnu::always_inline]] void step() {
        constexpr int64_t kLine = 64;
        for (int64_t line = 0; line < bytes; line += kLine) {
            if (hint == Hint::t1)
                __builtin_prefetch(at + line, 0, 2);
            else if (hint == Hint::nta)
                __builtin_prefetch(at + line, 0, 0);
            else
                __builtin_prefetch(at + line, 0, 3);
        }
        at += bytes;
    }
};

}  // namespace slimrt::cpu
