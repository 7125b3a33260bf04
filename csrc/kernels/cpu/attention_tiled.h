// Weighted sums of absorbed q8 rows by tiles of integers (TileKernels). For the units compiled once per ISA.
#pragma once

#include "kernels/cpu/attention_weights.h"

namespace slimrt::cpu::SLIMRT_ISA {
namespace {

/// 64 columns of a stored head, perhaps fewer, from `column` of whole rows on.
struct TiledStrip {
    const AbsorbedValues& x;
    int64_t column, offset;  // offset: of `column` in a block

    const Int8* row(int64_t i) const {
        const auto at = static_cast<uint64_t>(i);
        const auto* const rows = static_cast<const Int8*>(x.blocks[at / kBlockTokens]);
        return rows + offset + static_cast<int64_t>(at % kBlockTokens) * x.dim;
    }
};

/// out = factor * out + the sums of multiply_rows() + the outliers, for V vectors of a strip from column c
/// on; if Part, for one with `left` elements.
template <class Codes, int V, bool Part>
void add_tiled_sums(const TiledStrip& strip, const Weights& weights, int64_t c, int64_t left) {
    const AbsorbedValues& x = strip.x;
    const Outlier* const outliers = weights.outliers();
    const auto read = [&](const auto* p) { return Part ? load_part(p, left) : load(p); };
    for (int64_t pair = 0, i = 0; pair < x.n_pairs; ++pair) {
        const int32_t index = x.pairs[pair];
        float* const to = x.out + index * x.out_stride + strip.column + c;
        const Vec unit = splat(weights.unit(pair));
        const float factor = x.factor[pair];
        Vec sums[V];
#pragma GCC unroll 4
        for (int j = 0; j < V; ++j) {
            const Vec added = to_floats(load_sums(Codes{}, weights.sums(pair, c + j * lanes))) * unit;
            sums[j] = factor == 0 ? added : fma(splat(factor), read(to + j * lanes), added);
        }
        for (; i < weights.n_outliers() && outliers[i].pair == index; ++i) {
            const Vec weight = splat(weights.outlier(i));
            const Int8* const codes = strip.row(outliers[i].row) + c;
#pragma GCC unroll 4
            for (int j = 0; j < V; ++j) sums[j] = fma(weight, read(codes + j * lanes), sums[j]);
        }
#pragma GCC unroll 4
        for (int j = 0; j < V; ++j)
            Part ? store_part(to + j * lanes, sums[j], left) : store(to + j * lanes, sums[j]);
    }
}

/// Adds a stored head of q8 for all pairs, after Weights::quantise().
template <class Codes>
void add_tiled(const AbsorbedValues& x, const Weights& weights, int64_t head) {
    const int64_t first = x.first / kTiledStep * kTiledStep, end = x.first + x.n;
    for (int64_t column = 0; column < x.dim; column += kStripColumns) {
        const int64_t left = x.dim - column < kStripColumns ? x.dim - column : kStripColumns;
        const int64_t offset = head * static_cast<int64_t>(x.head_stride) + column;
        for (int64_t c = 0; c < left; c += 2 * lanes)
            x.tiles->multiply_rows({.weights = weights.codes(0) + first,
                                    .weights_stride = kAbsorbedRows,
                                    .n_pairs = x.n_pairs,
                                    .blocks = x.blocks + first / kBlockTokens,
                                    .offset = offset + c,
                                    .stride = x.dim,
                                    .steps = (end - first + kTiledStep - 1) / kTiledStep},
                                   weights.sums(0, c));
        const TiledStrip strip = {x, head * x.dim + column, offset};
        if (left == 4 * lanes) {
            add_tiled_sums<Codes, 4, false>(strip, weights, 0, left);
            continue;
        }
        for (int64_t c = 0; c < left; c += lanes)
            add_tiled_sums<Codes, 1, true>(strip, weights, c, left - c < lanes ? left - c : lanes);
    }
}

}  // namespace
}  // namespace slimrt::cpu::SLIMRT_ISA
