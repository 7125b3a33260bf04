// Attention over codes without dequantising rows: scales and minima of channels are folded into the queries,
// those of tokens into the softmax weights, and codes are unpacked in registers. For the units compiled once
// per ISA.
#pragma once

#include "kernels/cpu/attention_heads.h"

namespace slimrt::cpu::SLIMRT_ISA {
namespace {

/// Splits n pairs of scale and minimum into floats.
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

/// Multiplies a query by the scales of the channels; returns what their minima add to its scores (q . min).
[[gnu::noinline]] inline float fold_code_channels(const float* q, const ScaleAndMin* scales, int64_t dim,
                                                  float* folded) {
    constexpr int64_t kSome = 256;
    float scale[kSome], min[kSome], offset = 0;
    for (int64_t c = 0; c < dim; c += kSome) {
        const int64_t n = dim - c < kSome ? dim - c : kSome;
        split_scales(scales + c, n, scale, min);
        for (int64_t i = 0; i < n; ++i) folded[c + i] = q[c + i] * scale[i];
        offset += dot(q + c, min, n);
    }
    return offset;
}
template <class Rows>
float fold_channels(const float* q, const void* scales, int64_t dim, float* folded) {
    if constexpr (is_codes<Rows>)
        return fold_code_channels(q, static_cast<const ScaleAndMin*>(scales), dim, folded);
    const float* const scale = static_cast<const float*>(scales);
    for (int64_t c = 0; c < dim; ++c) folded[c] = q[c] * scale[c];
    return 0;
}

/// A query folded with the channels of a block, for keys stored before RoPE. With q rotated back by the first
/// row of the block, a pair of codes (a, b) of row i adds cos_i * (cos_a a + cos_b b + cos_min) + sin_i *
/// (sin_a a + sin_b b + sin_min), where cos_i, sin_i rotate from the first row to row i; scales are in cos_a
/// ... sin_b, minima in cos_min and sin_min. rest: columns without RoPE; rest_min: what their minima add.
struct FoldedQuery {
    static constexpr int64_t kMaxDim = kMaxRotatedDim;
    float cos_a[kMaxDim / 2], cos_b[kMaxDim / 2], sin_a[kMaxDim / 2], sin_b[kMaxDim / 2];
    float cos_min[kMaxDim / 2], sin_min[kMaxDim / 2], rest[kMaxDim], rest_min;
};

/// Columns a and b of pairs i ... i + lanes - 1.
template <class Row>
inline void load_pairs(const Row& row, const BlockRope& rope, int64_t i, Vec* a, Vec* b) {
    if (rope.interleaved) return deinterleave(load(row + 2 * i), load(row + (2 * i + lanes)), a, b);
    *a = load(row + i);
    *b = load(row + (i + rope.n_rot / 2));
}

inline void fold_rotated(const BlockRope& rope, const float* q, const float* scale, const float* min,
                         int64_t dim, FoldedQuery* to) {
    for (int64_t i = 0; i < rope.n_rot / 2; i += lanes) {
        Vec c, s, q_a, q_b, scale_a, scale_b, min_a, min_b;
        deinterleave(load(rope.first + 2 * i), load(rope.first + 2 * i + lanes), &c, &s);
        load_pairs(q, rope, i, &q_a, &q_b);
        load_pairs(scale, rope, i, &scale_a, &scale_b);
        load_pairs(min, rope, i, &min_a, &min_b);
        const Vec a = q_a * c + q_b * s, b = q_b * c - q_a * s;  // rotated back by the first row
        store(to->cos_a + i, a * scale_a);
        store(to->cos_b + i, b * scale_b);
        store(to->sin_a + i, b * scale_a);
        store(to->sin_b + i, splat(0) - a * scale_b);
        store(to->cos_min + i, a * min_a + b * min_b);
        store(to->sin_min + i, b * min_a - a * min_b);
    }
    to->rest_min = 0;
    for (int64_t c = rope.n_rot; c < dim; c += lanes) {
        store(to->rest + c, load(q + c) * load(scale + c));
        to->rest_min += sum(load(q + c) * load(min + c));
    }
}

/// Lane by lane, q . row over the columns with RoPE, by whole groups of codes. rotation: cosines, then sines
/// of the row.
template <int bits>
Vec rotated_groups(const FoldedQuery& q, CodeAt<bits> row, const float* rotation, int64_t pairs) {
    constexpr int64_t kGroup = StoredFew<bits>::kGroup;
    Vec sums[4];  // independent, to hide latency
    for (Vec& sum : sums) sum = splat(0);
    for (int64_t i = 0; i < pairs; i += kGroup) {
        Vec a[kGroup / lanes], b[kGroup / lanes];
        load_row(row + i, a);
        load_row(row + (i + pairs), b);
#pragma GCC unroll 8
        for (int64_t j = 0; j < kGroup / lanes; ++j) {
            const int64_t at = i + j * lanes;
            Vec *const cos = sums + j % 2, *const sin = cos + 2;
            const Vec cos_factor =
                fma(load(q.cos_a + at), a[j], fma(load(q.cos_b + at), b[j], load(q.cos_min + at)));
            const Vec sin_factor =
                fma(load(q.sin_a + at), a[j], fma(load(q.sin_b + at), b[j], load(q.sin_min + at)));
            *cos = fma(load(rotation + at), cos_factor, *cos);
            *sin = fma(load(rotation + at + pairs), sin_factor, *sin);
        }
    }
    return sums[0] + sums[1] + (sums[2] + sums[3]);
}

/// Lane by lane, acc[j] = q . rows[first + j] with RoPE, of R rows.
template <int R, class Rows>
[[gnu::always_inline]] inline void rotated_rows(const FoldedQuery& q, const BlockRope& rope, const Rows& rows,
                                                int64_t first, int64_t dim, Vec* acc) {
    const int64_t pairs = rope.n_rot / 2;
    const float* const rotations = rope.rotations + first * rope.n_rot;
    for (int j = 0; j < R; ++j) acc[j] = splat(0);
    int64_t i = 0;
    if constexpr (loads_groups && is_codes<Rows>) {
        if (!rope.interleaved && pairs % StoredFew<4>::kGroup == 0) {
            for (int j = 0; j < R; ++j)
                acc[j] = rotated_groups(q, rows.row(first + j), rotations + j * rope.n_rot, pairs);
            i = pairs;
        }
    }
    for (; i < pairs; i += lanes) {
        const Vec cos_a = load(q.cos_a + i), cos_b = load(q.cos_b + i), cos_min = load(q.cos_min + i);
        const Vec sin_a = load(q.sin_a + i), sin_b = load(q.sin_b + i), sin_min = load(q.sin_min + i);
#pragma GCC unroll 16
        for (int j = 0; j < R; ++j) {
            const float* const rotation = rotations + j * rope.n_rot + i;
            Vec a, b;
            load_pairs(rows.row(first + j), rope, i, &a, &b);
            const Vec cos_factor = fma(cos_a, a, fma(cos_b, b, cos_min));
            const Vec sin_factor = fma(sin_a, a, fma(sin_b, b, sin_min));
            acc[j] = fma(load(rotation), cos_factor, fma(load(rotation + pairs), sin_factor, acc[j]));
        }
    }
    for (int64_t c = rope.n_rot; c < dim; c += lanes)
#pragma GCC unroll 16
        for (int j = 0; j < R; ++j) acc[j] = fma(load(q.rest + c), load(rows.row(first + j) + c), acc[j]);
}

/// out[i] = q . rows[first + i] with RoPE, of n <= lanes rows; fewer than lanes one by one.
template <class Rows>
Vec rotated_dots(const FoldedQuery& q, const BlockRope& rope, const Rows& rows, int64_t first, int64_t n,
                 int64_t dim) {
    Vec acc[lanes];
    if (n == lanes) {
        rotated_rows<lanes>(q, rope, rows, first, dim, acc);
    } else {
        for (int64_t j = 0; j < lanes; ++j) {
            acc[j] = splat(0);
            if (j < n) rotated_rows<1>(q, rope, rows, first + j, dim, acc + j);
        }
    }
    return sums(acc) + splat(q.rest_min);
}

/// Scales and minima of channels as floats; minima are 0 for 8-bit codes.
template <class Rows>
void channel_scales(const void* from, int64_t dim, float* scales, float* mins) {
    if constexpr (is_codes<Rows>) {
        split_scales(static_cast<const ScaleAndMin*>(from), dim, scales, mins);
    } else {
        for (int64_t c = 0; c < dim; ++c) {
            scales[c] = static_cast<const float*>(from)[c];
            mins[c] = 0;
        }
    }
}

/// s[m][i] = scale * q[m] . RoPE(rows[i]) for keys stored before RoPE, with a scale for each channel.
template <class Rows>
void score_unrotated_keys(const BlockAttention& b, const float* q, int64_t n_q, const Head<Rows>& head,
                          Prefetch& next, float* s) {
    const int64_t dim = b.k.dim;
    float scales[FoldedQuery::kMaxDim], mins[FoldedQuery::kMaxDim];
    channel_scales<Rows>(head.group_scales, dim, scales, mins);
    FoldedQuery folded;
    for (int64_t m = 0; m < n_q; ++m) {
        fold_rotated(b.rope, q + m * dim, scales, mins, dim, &folded);
        for (int64_t i = 0; i < b.n; i += lanes) {
            const int64_t left = b.n - i;
            if (m == 0) next.advance(static_cast<int64_t>(b.k.head_stride) / kBlockTokens * lanes);
            const int64_t some = left < lanes ? left : lanes;
            const Vec dots = rotated_dots(folded, b.rope, head.rows, i, some, dim) * splat(b.scale);
            left < lanes ? store_part(s + m * kBlockTokens + i, dots, left)
                         : store(s + m * kBlockTokens + i, dots);
        }
    }
}

/// out = factor * out + weights * rows, with a scale for each channel: sums of codes first, then scales.
/// scratch: kBlockTokens * dim floats.
template <class Rows>
void sum_channels(const Product<Rows>& x, const void* scales, int64_t dim, float* scratch) {
    float scale[FoldedQuery::kMaxDim], min[FoldedQuery::kMaxDim];
    channel_scales<Rows>(scales, dim, scale, min);
    const float zero = 0;
    for (int64_t m = 0, some; m < x.n_q; m += some) {
        some = x.n_q - m < kBlockTokens ? x.n_q - m : kBlockTokens;
        const Product<Rows> codes = {x.p + m * x.ld, x.ld, some, &zero, 0, x.rows, x.n, scratch, size_t(dim)};
        some == 1 ? product<8>(codes, 0, dim) : product<tile / 4>(codes, 0, dim);
        for (int64_t i = m; i < m + some; ++i) {
            float total = 0;
            for (int64_t row = 0; row < x.n; ++row) total += x.p[i * x.ld + row];
            float* const out = x.out + i * x.out_stride;
            const float factor = x.factor[i * x.factor_step], *const sum = scratch + (i - m) * dim;
            for (int64_t c = 0; c < dim; ++c)
                out[c] = (factor == 0 ? 0 : factor * out[c]) + sum[c] * scale[c] + total * min[c];
        }
    }
}

/// Softmax weights for the codes of one group of columns: times the scale of the group in each row; lowest:
/// the sum of weight * minimum, which every column gets.
struct GroupWeights {
    float weights[kBlockTokens], lowest;
};

/// One query, G groups of columns at a time, so that there are enough independent sums.
template <int G, class Rows>
void add_groups(const Product<Rows>& x, int64_t m, int64_t column, const GroupWeights* groups) {
    constexpr int V = StoredFew<4>::kGroup / lanes;
    float* const out = x.out + m * x.out_stride + column;
    const float factor = x.factor[m * x.factor_step];
    Vec acc[G * V];
#pragma GCC unroll 16
    for (int j = 0; j < G * V; ++j) {
        const Vec low = splat(groups[j / V].lowest);
        acc[j] = factor == 0 ? low : fma(splat(factor), load(out + j * lanes), low);
    }
    for (int64_t i = 0; i < x.n; ++i) {
        const auto row = x.rows.row(i) + column;
        if constexpr (loads_groups) {
#pragma GCC unroll 2
            for (int g = 0; g < G; ++g) {
                Vec codes[V];
                load_row(row + g * StoredFew<4>::kGroup, codes);
                const Vec weight = splat(groups[g].weights[i]);
#pragma GCC unroll 8
                for (int j = 0; j < V; ++j) acc[g * V + j] = fma(weight, codes[j], acc[g * V + j]);
            }
        } else {
#pragma GCC unroll 16
            for (int j = 0; j < G * V; ++j)
                acc[j] = fma(splat(groups[j / V].weights[i]), load(row + j * lanes), acc[j]);
        }
    }
#pragma GCC unroll 16
    for (int j = 0; j < G * V; ++j) store(out + j * lanes, acc[j]);
}

/// out = factor * out + weights * rows, where groups of columns have a scale and a minimum in each row.
/// scratch: two floats for each group of each row.
template <class Rows>
void value_codes(const Product<Rows>& x, const void* scales, int64_t dim, int64_t head_stride, Prefetch& next,
                 float* scratch) {
    constexpr int64_t kGroup = StoredFew<4>::kGroup, kQueries = 64;
    constexpr int kAtOnce = tile * lanes / kGroup > 4 ? 4 : tile * lanes / kGroup > 1 ? 2 : 1;
    const int64_t groups = dim / kGroup;
    float* const mins = scratch + x.n * groups;
    split_scales(static_cast<const ScaleAndMin*>(scales), x.n * groups, scratch, mins);
    for (int64_t g = 0, some; g < groups; g += some) {
        some = x.n_q == 1 && groups - g >= kAtOnce ? kAtOnce : 1;
        next.advance(head_stride / groups * some);
        GroupWeights of[kQueries];  // of all queries, or of several groups for one query
        for (int64_t k = 0; k < some; ++k) {
            float scale[kBlockTokens], min[kBlockTokens];
            for (int64_t i = 0; i < x.n; ++i) {
                scale[i] = scratch[i * groups + g + k];
                min[i] = mins[i * groups + g + k];
            }
            for (int64_t m = 0; m < x.n_q; ++m) {
                const float* const p = x.p + m * x.ld;
                for (int64_t i = 0; i < x.n; ++i) of[k + m].weights[i] = p[i] * scale[i];
                of[k + m].lowest = dot(p, min, x.n);
            }
        }
        if (x.n_q == 1) {
            some == 1 ? add_groups<1>(x, 0, g * kGroup, of) : add_groups<kAtOnce>(x, 0, g * kGroup, of);
            continue;
        }
        Product<Rows> part = x;
        part.p = of[0].weights;
        part.ld = sizeof(GroupWeights) / sizeof(float);
        product<kGroup / lanes>(part, g * kGroup, (g + 1) * kGroup);
        for (int64_t m = 0; m < x.n_q; ++m) {
            float* const out = x.out + m * x.out_stride + g * kGroup;
            for (int64_t j = 0; j < kGroup; j += lanes) store(out + j, load(out + j) + splat(of[m].lowest));
        }
    }
}

}  // namespace
}  // namespace slimrt::cpu::SLIMRT_ISA
