// Scores and values of rows of 4-bit codes, with a scale and a minimum for each group of columns of a row, by
// integer products, where the ISA has fast ones (integer_scores). For the units compiled once per ISA.
#pragma once

#include "kernels/cpu/attention_int8.h"

namespace slimrt::cpu::SLIMRT_ISA {
namespace {

/// Whether scores of these rows are integer products of each group of columns.
inline bool has_group_scores(const BlockAttention& b) {
    return integer_scores && DType(b.k.type) == DType::Q4 && !b.k.by_channel && b.packed_q &&
           packs_four_bits(b.k.dim);
}

constexpr int64_t kGroup = StoredFew<4>::kGroup;
/// Columns of a row that unpack_group() makes vectors of codes at a time.
constexpr int64_t kUnpacked = kCodes > kGroup ? kCodes : kGroup;

/// n floats that belong to so many groups in turn: those of group g go to to + g * stride, and perhaps up to
/// `lanes` of what is there behind them.
inline void transpose_groups(const float* from, int64_t n, int64_t groups, float* to, int64_t stride) {
    if (groups % 2) {
        for (int64_t g = 0; g < groups; ++g)
            for (int64_t i = g; i < n; i += groups) to[g * stride + i / groups] = from[i];
        return;
    }
    float halves[2][kMaxFourBitGroups * kBlockTokens / 2];
    float *const even = groups == 2 ? to : halves[0], *const odd = groups == 2 ? to + stride : halves[1];
    for (int64_t i = 0; i < n; i += 2 * lanes) {
        Vec some[2];
        deinterleave(load(from + i), load(from + i + lanes), some, some + 1);
        store(even + i / 2, some[0]);
        store(odd + i / 2, some[1]);
    }
    if (groups == 2) return;
    transpose_groups(even, n / 2, groups / 2, to, 2 * stride);
    transpose_groups(odd, n / 2, groups / 2, to + stride, 2 * stride);
}

/// Scales and middles of the groups of n rows of a block: a value is middle + scale * (code - 8). Of the
/// smaller numbers that are left the digits of queries and weights lose less.
struct GroupScales {
    float *by_row, *scales, *middles;  // one row after another; one group after another

    /// scratch: four floats for each group of a block.
    GroupScales(const void* stored, int64_t n, int64_t groups, float* scratch) {
        const int64_t all = groups * kBlockTokens;
        float* const middles_by_row = scratch + all;
        by_row = scratch, scales = scratch + 2 * all, middles = scratch + 3 * all;
        split_scales(static_cast<const ScaleAndMin*>(stored), n * groups, by_row, middles_by_row);
        for (int64_t i = 0; i < n * groups; i += lanes)
            store(middles_by_row + i, fma(splat(8), load(by_row + i), load(middles_by_row + i)));
        transpose_groups(by_row, n * groups, groups, scales, kBlockTokens);
        transpose_groups(middles_by_row, n * groups, groups, middles, kBlockTokens);
    }
};

/// Products of Q queries with the first n <= tile / Q rows, without what middles add. scales: of the groups
/// of these rows, one row after another. ahead: a step for each row.
template <int Q, class Codes>
void score_codes(Queries q, const CodeRows<4>& rows, int64_t n, const float* scales, float scale,
                 PrefetchSteps ahead, float* s) {
    constexpr int R = tile / Q, vectors = static_cast<int>(kUnpacked / kCodes);
    static constexpr int8_t kEight[4] = {8, 8, 8, 8};
    using Sums = decltype(zero_sums(Codes{}));
    const Codes eights = splat_quad(Codes{}, kEight);
    const int64_t groups = q.dim / kGroup;
    const PackedQuery* query[Q];
    for (int m = 0; m < Q; ++m) query[m] = reinterpret_cast<const PackedQuery*>(q.from(m).packed);
    Vec acc[tile] = {};
    for (int64_t d = 0; d < q.dim; d += kUnpacked) {
        const int8_t *high[Q], *low[Q];
        Sums high_start[Q], low_start[Q];  // -8 for each code
        for (int m = 0; m < Q; ++m) {
            high[m] = reinterpret_cast<const int8_t*>(query[m] + 1) + d;
            low[m] = high[m] + packed_digits(q.dim);
            high_start[m] = low_start[m] = zero_sums(Codes{});
            for (int k = 0; k < vectors; ++k) {
                high_start[m] = add_dots(high_start[m], eights, high[m] + k * kCodes);
                low_start[m] = add_dots(low_start[m], eights, low[m] + k * kCodes);
            }
            high_start[m] = zero_sums(Codes{}) - high_start[m];
            low_start[m] = zero_sums(Codes{}) - low_start[m];
        }
        for (int64_t i = 0; i < n; ++i) {
            if (d == 0) ahead.step();
            Codes codes[vectors];
            unpack_group(FewBits<4>(), rows.row(i).row + d / 2, codes);
            const Vec by = group_scales(Codes{}, scales + i * groups + d / kGroup);
#pragma GCC unroll 2
            for (int m = 0; m < Q; ++m) {
                Sums highs = high_start[m], lows = low_start[m];
#pragma GCC unroll 2
                for (int k = 0; k < vectors; ++k) {
                    highs = add_dots(highs, codes[k], high[m] + k * kCodes);
                    lows = add_dots(lows, codes[k], low[m] + k * kCodes);
                }
                acc[m * R + i] = fma(join_digits(highs, lows), by, acc[m * R + i]);
            }
        }
    }
    float dots[tile];
    for (int i = 0; i < tile; i += lanes) store(dots + i, sums(acc + i));
    for (int m = 0; m < Q; ++m)
        for (int i = 0; i < R; ++i) s[m * kBlockTokens + i] = dots[m * R + i] * (scale * query[m]->scale);
}

/// s[m] += scale * (q[m] . middle of every group)
inline void add_middles(Queries q, const GroupScales& of, float scale, float* s) {
    for (int64_t c = 0; c < q.dim; c += kGroup) {
        Vec total = splat(0);
        for (int64_t i = c; i < c + kGroup; i += lanes) total = total + load(q.floats + i);
        const Vec by = splat(scale * sum(total));
        const float* const middles = of.middles + c / kGroup * kBlockTokens;
        for (int64_t i = 0; i < kBlockTokens; i += lanes)
            store(s + i, fma(by, load(middles + i), load(s + i)));
    }
}

/// s[m][i] = scale * q[m] . rows[i] of n <= kBlockTokens rows of whole 64 columns. scratch: four floats for
/// each group of a block.
template <class Codes>
void score_four_bits(Queries q, int64_t n_q, const CodeRows<4>& rows, const void* stored, int64_t n,
                     float scale, int64_t head_stride, Prefetch& next, float* scratch, float* s) {
    const int64_t groups = q.dim / kGroup, of_row = head_stride / kBlockTokens;
    const GroupScales of(stored, n, groups, scratch);
    const auto tiles = [&](auto kernel, int64_t m, int64_t R) {
        for (int64_t i = 0; i < n; i += R) {
            const PrefetchSteps ahead = m == 0 ? next.in_steps(R * of_row, of_row) : PrefetchSteps();
            kernel(q.from(m), rows.at(i, 0), n - i < R ? n - i : R, of.by_row + i * groups, scale, ahead,
                   s + m * kBlockTokens + i);
        }
    };
    int64_t m = 0;
    for (; m + 2 <= n_q; m += 2) tiles(score_codes<2, Codes>, m, tile / 2);
    if (m < n_q) tiles(score_codes<1, Codes>, m, tile);
    for (m = 0; m < n_q; ++m) add_middles(q.from(m), of, scale, s + m * kBlockTokens);
}

/// Quantises softmax weights times the scales of a group; lowest: what its middles add. Returns false if a
/// product is not finite.
inline bool split_products(const float* p, const GroupScales& of, int64_t group, QuantisedWeights* digits) {
    float products[kBlockTokens];
    Vec sums = splat(0);
    for (int64_t i = 0; i < kBlockTokens; i += lanes) {
        const int64_t at = group * kBlockTokens + i;
        store(products + i, load(p + i) * load(of.scales + at));
        sums = fma(load(p + i), load(of.middles + at), sums);
    }
    if (!split_weights(products, kBlockTokens, digits)) return false;
    digits->lowest = sum(sums);
    return true;
}

/// out = factor * out + weights * rows of a whole block. scratch: four floats for each group of a block.
/// Returns false, without effect, if there are too many queries and groups, or a weight times a scale is not
/// finite.
template <class Codes>
bool four_bit_values(const Product<CodeRows<4>>& x, const void* stored, int64_t dim, int64_t head_stride,
                     Prefetch& next, float* scratch) {
    constexpr int64_t kQuads = kBlockTokens / 4;
    constexpr int64_t kColumns = absorbed_vectors * lanes < kGroup ? absorbed_vectors * lanes : kGroup;
    const int64_t groups = dim / kGroup, stride = static_cast<int64_t>(x.rows.stride);
    if (!packs_four_bits(dim) || x.n_q * groups > kMaxFourBitGroups) return false;
    const GroupScales of(stored, kBlockTokens, groups, scratch);
    QuantisedWeights digits[kMaxFourBitGroups];
    for (int64_t m = 0; m < x.n_q; ++m)
        for (int64_t g = 0; g < groups; ++g)
            if (!split_products(x.p + m * x.ld, of, g, digits + m * groups + g)) return false;
    for (int64_t column = 0; column < dim; column += kColumns) {
        const int64_t g = column / kGroup, bytes = head_stride / (dim / kColumns);
        const uint8_t* const codes = x.rows.row(0).row + g * kGroup / 2;
        Codes quads[kQuads][4];
        for (int64_t t = 0; t < kQuads; ++t)
            transpose_rows(FourBitRows{codes + 4 * t * stride, stride, column % kGroup ? 4 : 0}, quads[t]);
        const bool in_steps = integers_in_steps && x.n_q == 1;
        const PrefetchSteps ahead = next.in_steps(bytes, in_steps ? bytes / kQuads : 0);
        int64_t m = 0;
        const auto with = [&](auto kernel, int64_t step) {
            kernel(x, m, column, digits + m * groups + g, groups, quads, ahead);
            m += step;
        };
        constexpr int V = static_cast<int>(kColumns / lanes);
        while (m + 2 <= x.n_q) with(integer_columns<2, V, CodeRows<4>, Codes>, 2);
        if (m < x.n_q) with(integer_columns<1, V, CodeRows<4>, Codes>, 1);
    }
    return true;
}

}  // namespace
}  // namespace slimrt::cpu::SLIMRT_ISA
