// Products of absorbed rows of codes. For the units compiled once per ISA.
#pragma once

#include "kernels/cpu/attention_weights.h"

namespace slimrt::cpu::SLIMRT_ISA {
namespace {

inline void store_turned(int16_t* to, Vec a, Vec b) { store_factors(to, a, b); }
inline void store_turned(float* to, Vec a, Vec b) {
    store(to, a);
    store(to + lanes, b);
}

/// The query as the middle of a block would meet it: what the cosines of rows beside it are multiplied with,
/// then what their sines are.
template <class Number>
void turn_query(const TurnedQuery* query, const float* middle, int64_t dim, Number* to) {
    const float *const q = reinterpret_cast<const float*>(query + 1), *const across = q + dim;
    for (int64_t c = 0; c < dim; c += 2 * lanes) {
        Vec along[2], right[2];
        for (int i = 0; i < 2; ++i) {
            const int64_t at = c + i * lanes;
            const Vec cosine = load(middle + at), sine = load(middle + dim + at);
            along[i] = fma(cosine, load(q + at), sine * load(across + at));
            right[i] = cosine * load(across + at) - sine * load(q + at);
        }
        store_turned(to + c, along[0], along[1]);
        store_turned(to + dim + c, right[0], right[1]);
    }
}

/// Rows at multiples of a stride, from one pointer: else each has an address of its own, and they are
/// spilled.
struct FromOne {
    int64_t one, three;

    explicit FromOne(int64_t stride) : one(stride), three(3 * stride) { asm("" : "+r"(one), "+r"(three)); }
    /// Where row j is, `four` being where row j / 4 * 4 is; goes on to the next four.
    const char* operator()(int j, const char*& four) const {
        if (j > 0 && j % 4 == 0) four += 4 * one;
        return four + (j % 4 == 3 ? three : j % 4 * one);
    }
};

/// Rows of a block by twos, of which one is as far before its middle as the other behind it, so that a turn
/// serves both: in a tile of `lanes` rows the first of those behind it, and the last before it.
struct Twos {
    static constexpr int half = lanes / 2;
    int64_t behind, before;

    explicit Twos(int64_t tile) : behind(kTurnRows + tile * half), before(kBlockTokens - 1 - behind) {}
    int64_t first() const { return before + 1 - half; }
    int64_t end() const { return behind + half; }
    int64_t turn() const { return behind - kTurnRows; }
    /// fn(first row, how many, their place in the tile) for either half, of the rows before row n.
    template <class Fn>
    void each_half(int64_t n, const Fn& fn) const {
        fn(first(), n - first() < half ? n - first() : half, 0);
        if (behind < n) fn(behind, n - behind < half ? n - behind : half, half);
    }
};

/// Products of a turned query with a tile of rows, those before the middle first; `stride` bytes apart from
/// the one next to the middle on.
template <class Stored>
Vec dots_of_floats(const float* query, const Stored* before, const Stored* behind, int64_t stride,
                   const float* turns, const Twos& twos, int64_t dim) {
    Vec acc[lanes];
#pragma GCC unroll 16
    for (Vec& sum : acc) sum = splat(0);
    for (int64_t c = 0; c < dim; c += lanes) {
        const Vec along = load(query + c), right = load(query + dim + c);
        const float* const turn = turns_at(turns, twos.turn(), c);
        const FromOne up(stride), down(-stride);
        const char *above = reinterpret_cast<const char*>(behind + c),
                   *below = reinterpret_cast<const char*>(before + c);
#pragma GCC unroll 8
        for (int j = 0; j < Twos::half; ++j) {
            const float* const by = turn + j * 2 * kTurnColumns;
            const Vec cosines = along * load(by), sines = right * load(by + kTurnColumns);
            Vec &sum = acc[Twos::half + j], &other = acc[Twos::half - 1 - j];
            sum = fma(cosines + sines, load(reinterpret_cast<const Stored*>(up(j, above))), sum);
            other = fma(cosines - sines, load(reinterpret_cast<const Stored*>(down(j, below))), other);
        }
    }
    return sums(acc);
}

/// Calls for what will be read after a vector of a stored head's rows, which follow each other, as far behind
/// them as memory is away.
inline void call_ahead(const char* rows, int64_t stride) {
    constexpr int64_t kAhead = 10 << 10, kLine = 64;
    const char *at = rows + kAhead, *const end = at + lanes * stride;
#pragma GCC unroll 8
    for (; at < end; at += kLine) __builtin_prefetch(at, 0, 3);
}

/// Calls for a head's share of the block that follows one of whole rows, in the order of memory: for the
/// second level, since their heads are read one after the other.
inline void call_share(const TurnedScores& x, int64_t head) {
    constexpr int64_t kLine = 64;
    const int64_t bytes = kBlockTokens * static_cast<int64_t>(x.stride);
    const char* const from = static_cast<const char*>(x.ahead);
    for (int64_t at = head * bytes / x.n_heads / kLine * kLine; at < (head + 1) * bytes / x.n_heads;
         at += kLine)
        __builtin_prefetch(from + at, 0, 2);
}

/// The same of codes: columns past a head's own meet zeros.
inline Vec dots_of_codes(const int16_t* query, const char* before, const char* behind, int64_t stride,
                         const int16_t* turns, const Twos& twos, int64_t dim) {
    constexpr int64_t kColumns = 2 * lanes;
    RowSums acc[lanes];
#pragma GCC unroll 16
    for (RowSums& sums : acc) sums = no_sums(RowCodes{});
    for (int64_t c = 0; c < dim; c += kColumns) {
        const RowFactors along = load_factors(query + c), right = load_factors(query + dim + c);
        const int16_t* const turn = turns_at(turns, twos.turn(), c);
        const FromOne up(stride), down(-stride);
        const char *above = behind + c, *below = before + c;
#pragma GCC unroll 8
        for (int j = 0; j < Twos::half; ++j) {
            const int16_t* const by = turn + j * 2 * kTurnColumns;
            const RowFactors cosines = multiplied(along, load_factors(by)),
                             sines = multiplied(right, load_factors(by + kTurnColumns));
            RowSums &sum = acc[Twos::half + j], &other = acc[Twos::half - 1 - j];
            const auto* const codes = reinterpret_cast<const Int8*>(up(j, above));
            sum = add_wide_products(sum, codes, plus(cosines, sines));
            const auto* const others = reinterpret_cast<const Int8*>(down(j, below));
            other = add_wide_products(other, others, minus(cosines, sines));
        }
    }
    Vec floats[lanes];
#pragma GCC unroll 16
    for (int j = 0; j < lanes; ++j) floats[j] = to_floats(acc[j]);
    return sums(floats);
}

}  // namespace
}  // namespace slimrt::cpu::SLIMRT_ISA
