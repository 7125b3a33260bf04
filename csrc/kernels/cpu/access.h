// Software prefetch of memory that is read once (weights of one token, cached rows). Which hint and distance
// are fastest differs from CPU to CPU; they change the time of a result, never its bits.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace slimrt::cpu {

/// The locality of a prefetch: t0 into all caches, t1 past the first level (into L2), nta past all but the
/// first; or none, which leaves it to the hardware prefetcher.
enum class Hint : uint8_t { none, t0, t1, nta };

struct Access {
    Hint hint = Hint::none;
    bool several = false;  // several rows of weights at a time, each a stream of its own, where a kernel can
    int32_t ahead = 0;     // prefetch distance in bytes: how far ahead of the load

    bool operator==(const Access&) const = default;
};

/// The address to prefetch for the first of R rows that are read side by side, R at a time: `ahead` bytes
/// further in the order in which they are read, which may be in the next R rows.
template <int R>
class PrefetchTarget {
  public:
    PrefetchTarget(const uint8_t* row, size_t stride, Access access) : skip_((R - 1) * stride) {
        const size_t each = static_cast<size_t>(access.ahead) / R, rows = each / stride;
        near_ = row + rows * R * stride + each % stride;
        wrap_ = stride - each % stride;
    }
    /// For the load at `bytes` of the row.
    const uint8_t* at(size_t bytes) const { return near_ + bytes + (R > 1 && bytes >= wrap_ ? skip_ : 0); }

  private:
    const uint8_t* near_;
    size_t wrap_, skip_;
};

/// Prefetches the cache lines of [at, at + bytes); the addresses need not be mapped. Where t0 is the usual
/// hint it is tested first: in NEON loops each further test costs 5 %.
template <bool usually_t0 = false>
[[gnu::always_inline]] static inline void prefetch(const void* at, int64_t bytes, Hint hint) {
    const uint8_t* const p = static_cast<const uint8_t*>(at);
    constexpr int kLine = 64;
    // The hint is tested here, in the loop: one copy of the loop around it for each hint would be no faster.
    if (!__builtin_constant_p(hint)) asm("" : "+r"(hint));
    if (usually_t0 ? __builtin_expect(hint == Hint::t0, true) : hint == Hint::t0)
        for (int64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(p + i, 0, 3);
    else if (hint == Hint::nta)
        for (int64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(p + i, 0, 0);
    else if (hint == Hint::t1)
        for (int64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(p + i, 0, 2);
}

/// Prefetches in steps between the arithmetic: once all line fill buffers are taken (Zen 4: 24 lines) a CPU
/// drops further prefetches, or stalls.
struct PrefetchSteps {
    const char* at = nullptr;
    int64_t bytes = 0;  // of a step; 0: no prefetch
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
