// Attention over absorbed rows of Q8, with integer products where there are fast ones. What serves all heads
// is done once: four rows (or two) side by side, for some columns of all rows at a time, which then stay in
// the first-level cache. Compiled once per ISA.
#include "kernels/cpu/attention_absorbed.h"

namespace slimrt::cpu::SLIMRT_ISA {

void score_turned(const TurnedScores& x) {
    const int64_t dim = turned_dim(x.dim);
    for (int64_t pair = 0; pair < x.n_heads * x.n_q; ++pair) {
        const int64_t head = pair / x.n_q;
        const auto* const q = reinterpret_cast<const TurnedQuery*>(reinterpret_cast<const float*>(x.q) +
                                                                   pair * turned_query_floats(x.dim));
        int16_t turned[2 * kMaxTurnedDim];
        turn_query(q, x.first, dim, turned);
        const TurnedRows rows = {static_cast<const char*>(x.data) + head * x.head_stride,
                                 static_cast<int64_t>(x.stride), x.turns, dim};
        const float* const scales =
            reinterpret_cast<const float*>(static_cast<const char*>(x.scales) + head * x.scale_stride);
        float* const out = x.out + pair * x.ld;
        for (int64_t i = 0; i < x.n; i += lanes) {
            if (pair % x.n_q == 0) call_ahead(rows, i);
            const int64_t left = x.n - i;
            const auto read = [&](const float* p) {
                return left < lanes ? load_part(p + i, left) : load(p + i);
            };
            Vec dots = left < lanes ? dots_of_rows<false>(turned, rows, i, x.n)
                                    : dots_of_rows<true>(turned, rows, i, x.n);
            dots = dots * splat(q->unit) * read(scales);
            if (x.factors) dots = dots * read(x.factors);
            if (x.accumulate) dots = dots + read(out);
            left < lanes ? store_part(out + i, dots, left) : store(out + i, dots);
        }
    }
}

int64_t set_aside(float* p, int64_t n, int32_t pair, float factor, float* squares, SetAside* to) {
    // Beside others whose squares add up to this many times its own, a weight's rounding does not matter.
    constexpr float kShare = 8;
    const float before = *squares * factor * factor;
    int64_t n_aside = 0;
    for (;;) {
        Vec all = splat(0), high = splat(0);
        for (int64_t i = 0; i < n; i += lanes) {
            const Vec some = load(p + i);
            all = fma(some, some, all);
            high = max(some, high);
        }
        *squares = before + sum(all);
        const float top = max_of(high);
        if (!(top * top * kShare > *squares) || n_aside == kMaxSetAside) break;
        for (int64_t i = 0; i < n && n_aside < kMaxSetAside; ++i) {
            if (!(p[i] * p[i] * kShare > *squares)) continue;
            to[n_aside++] = {pair, static_cast<int32_t>(i), p[i]};
            p[i] = 0;
        }
    }
    return n_aside;
}

void absorb_values(const AbsorbedValues& x) {
    Weights weights(x);
    for (int64_t group = 0; group < x.heads; ++group) {
        weights.round(group);
        for (int64_t column = 0; column < x.dim; column += kStripColumns) {
            Strip strip;
            gather_strip(x, group, column, strip);
            add_strip(x, group, column, strip, weights);
        }
    }
    for (int64_t i = 0; i < x.n_aside; ++i) add_aside(x, x.aside[i]);
}

}  // namespace slimrt::cpu::SLIMRT_ISA
