// Weighted sums of absorbed q8 rows by tiles of integers (TileKernels), 128 rows at a time: what is read
// again and again (their transposed codes, the weights, the sums) then stays in L1. For the units compiled
// once per ISA.
#pragma once

#include "kernels/cpu/attention_weights.h"

namespace slimrt::cpu::SLIMRT_ISA {
namespace {

constexpr int64_t kStepLanes = 16;               // quads of rows that a step multiplies
constexpr int64_t kTiledLanes = 2 * kStepLanes;  // that are transposed at a time

/// Products of the weights of 32 pairs, from row `row` on, with two vectors of transposed lanes.
template <class Codes>
void multiply_tiles(const AbsorbedValues& x, const Weights& weights, int64_t pair, int64_t row,
                    const Codes* codes, int64_t n_lanes, bool accumulate, int32_t* sums) {
    const int64_t second = x.n_pairs - pair > kTilePairs ? kTilePairs * kAbsorbedRows : 0;
    x.tiles->multiply({.a = weights.codes(pair) + row,
                       .a_stride = kAbsorbedRows,
                       .a_next = second,
                       .b = codes,
                       .b_stride = static_cast<int64_t>(absorbed_vectors * sizeof *codes),
                       .b_next = static_cast<int64_t>(sizeof *codes),
                       .steps = (n_lanes + kStepLanes - 1) / kStepLanes,
                       .accumulate = accumulate},
                      sums);
}

/// 64 columns of a stored head, perhaps fewer, from `column` of whole rows on.
struct TiledStrip {
    const AbsorbedValues& x;
    int64_t head, column, left;

    const Int8* row(int64_t i) const {
        const auto* const rows = reinterpret_cast<const Int8*>(head_of(x, i / kBlockTokens, head));
        return rows + i % kBlockTokens * x.dim + column % x.dim;
    }
};

/// out = factor * out + the sums of multiply() + the outliers, for V vectors of a strip from column c on; if
/// Part, for one with `left` elements.
template <class Codes, int V, bool Part>
void add_tiled_sums(const TiledStrip& strip, const Weights& weights, int64_t c, int64_t left) {
    const AbsorbedValues& x = strip.x;
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
        for (; i < x.n_outliers && x.outliers[i].pair == index; ++i) {
            const Vec weight = splat(weights.outlier(i));
            const Int8* const codes = strip.row(x.outliers[i].row) + c;
#pragma GCC unroll 4
            for (int j = 0; j < V; ++j) sums[j] = fma(weight, read(codes + j * lanes), sums[j]);
        }
#pragma GCC unroll 4
        for (int j = 0; j < V; ++j)
            Part ? store_part(to + j * lanes, sums[j], left) : store(to + j * lanes, sums[j]);
    }
}

/// Adds a stored head of q8 for all pairs, after Weights::take_scales(), 128 rows at a time: what is read
/// again and again (their transposed codes, the weights, the sums) then stays in L1.
template <class Codes>
void add_tiled(const AbsorbedValues& x, Weights& weights, int64_t head) {
    alignas(64) Codes codes[kTiledLanes][absorbed_vectors];
    const int64_t begin = x.first / rows_per_lane, end = (x.first + x.n + rows_per_lane - 1) / rows_per_lane;
    for (int64_t column = 0; column < x.dim; column += kStripColumns) {
        const int64_t left = x.dim - column < kStripColumns ? x.dim - column : kStripColumns;
        const TiledStrip strip = {x, head, head * x.dim + column, left};
        bool accumulate = false;
        for (int64_t lane = begin / kTiledLanes * kTiledLanes; lane < end; lane += kTiledLanes) {
            if (column == 0) weights.quantise_rows(lane * rows_per_lane, kTiledLanes * rows_per_lane);
            const int64_t upto = lane + kTiledLanes < end ? lane + kTiledLanes : end;
            // Other lanes meet weights of 0.
            for (int64_t i = lane < begin ? begin : lane; i < upto; ++i)
                transpose_rows(RowsOf<Int8>{strip.row(i * rows_per_lane), static_cast<size_t>(x.dim)},
                               codes[i - lane]);
            for (int64_t pair = 0; pair < x.n_pairs; pair += 2 * kTilePairs)
                for (int64_t c = 0; c < left; c += 2 * lanes)
                    multiply_tiles(x, weights, pair, lane * rows_per_lane, codes[0] + c / lanes, upto - lane,
                                   accumulate, weights.sums(pair, c));
            accumulate = true;
        }
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
