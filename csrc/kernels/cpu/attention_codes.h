// Attention over codes as they are stored: the scales and minima of channels go into the queries, those of
// tokens into the softmax weights, and a code is unpacked in registers. For the units compiled once per ISA.
#pragma once

#include "kernels/cpu/attention_heads.h"

namespace slimrt::cpu::SLIMRT_ISA {
namespace {

template <class Rows>
constexpr bool is_codes = false;
template <int bits>
constexpr bool is_codes<CodeRows<bits>> = true;

/// n pairs as floats, scales and minima.
inline void split_scales(const ScaleAndMin* from, int64_t n, float* scales, float* mins) {
    const Half* const halves = reinterpret_cast<const Half*>(from);
    int64_t i = 0;
    for (; i + lanes <= n; i += lanes) {
        Vec scale, min;
        deinterleave(load(halves + 2 * i), load(halves + 2 * i + lanes), &scale, &min);
        store(scales + i, scale);
        store(mins + i, min);
    }
    for (; i < n; ++i) {
        scales[i] = from[i].scale;
        mins[i] = from[i].min;
    }
}

inline float dot(const float* a, const float* b, int64_t n) {
    Vec total = splat(0);
    int64_t i = 0;
    for (; i + lanes <= n; i += lanes) total = fma(load(a + i), load(b + i), total);
    if (i < n) total = fma(load_part(a + i, n - i), load_part(b + i, n - i), total);
    return sum(total);
}

/// A query for the codes of rows whose channels have scales; returns what the minima add to its scores.
template <class Rows>
float fold_channels(const float* q, const void* scales, int64_t dim, float* folded) {
    if constexpr (is_codes<Rows>) {
        constexpr int64_t kSome = 256;
        const auto* const of = static_cast<const ScaleAndMin*>(scales);
        float scale[kSome], min[kSome], offset = 0;
        for (int64_t c = 0; c < dim; c += kSome) {
            const int64_t n = dim - c < kSome ? dim - c : kSome;
            split_scales(of + c, n, scale, min);
            for (int64_t i = 0; i < n; ++i) folded[c + i] = q[c + i] * scale[i];
            offset += dot(q + c, min, n);
        }
        return offset;
    } else {
        const float* const scale = static_cast<const float*>(scales);
        for (int64_t c = 0; c < dim; ++c) folded[c] = q[c] * scale[c];
        return 0;
    }
}

/// out = factor * out + weights * rows, whose groups of columns have scales and minima in each row. `scratch`
/// takes two floats for each.
template <class Rows>
void value_codes(const Product<Rows>& x, const void* scales, int64_t dim, Prefetch& next, float* scratch) {
    constexpr int64_t kGroup = StoredFew<4>::kGroup, kQueries = 64;
    const int64_t groups = dim / kGroup;
    float* const mins = scratch + x.n * groups;
    float weights[kQueries * kBlockTokens], lowest[kQueries];
    split_scales(static_cast<const ScaleAndMin*>(scales), x.n * groups, scratch, mins);
    for (int64_t g = 0; g < groups; ++g) {
        for (int64_t m = 0; m < x.n_q; ++m) {
            float low = 0;
            for (int64_t i = 0; i < x.n; ++i) {
                const float p = x.p[m * x.ld + i];
                weights[m * kBlockTokens + i] = p * scratch[i * groups + g];
                low += p * mins[i * groups + g];
            }
            lowest[m] = low;
        }
        next.some(x.n * static_cast<int64_t>(x.rows.stride) / groups);
        Product<Rows> some = x;
        some.p = weights;
        some.ld = kBlockTokens;
        product<kGroup / lanes>(some, g * kGroup, (g + 1) * kGroup);
        for (int64_t m = 0; m < x.n_q; ++m) {
            float* const out = x.out + m * x.out_stride + g * kGroup;
            for (int64_t j = 0; j < kGroup; j += lanes) store(out + j, load(out + j) + splat(lowest[m]));
        }
    }
}

}  // namespace
}  // namespace slimrt::cpu::SLIMRT_ISA
