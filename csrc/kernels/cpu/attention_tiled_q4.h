// Weighted sums of absorbed rows in q4 by tiles of bf16: a value is its group's midpoint plus the scale times
// a code in -8 ... 7, and the latter, rounded to bf16, errs by at most 1/64 of a scale. Midpoints are summed
// in floats. For the units compiled once per ISA.
#pragma once

#include "kernels/cpu/attention_q4.h"

namespace slimrt::cpu::SLIMRT_ISA {
namespace {

/// The weights of all pairs, outliers among them, packed for tiles, and what midpoints add.
class TiledWeights {
  public:
    explicit TiledWeights(const AbsorbedValues& x)
        : x_(x), stride_((x.n_pairs + 15) / 16 * 16), offsets_(x.weights + stride_ * kPair) {
        static_assert(kPair + kMaxOffsets <= weight_floats(16) / 16);
        for (int64_t pair = 0, i = 0; pair < x.n_pairs; ++pair) {
            float* const to = x.weights + pair * kPair;
            memcpy(to, x.p + pair * kAbsorbedRows, static_cast<size_t>(x.rows) * sizeof(float));
            for (; i < x.n_outliers && x.outliers[i].pair == x.pairs[pair]; ++i)
                to[x.outliers[i].row] += x.outliers[i].weight;
            x.tiles->pack(to, x.rows, 1);
        }
    }

    void find_offsets(const float* of_rows) { sum_offsets(x_, of_rows, offsets_, stride_); }

    /// Adds `group` of the offsets, columns [column, column + kQ4Columns) of whole rows: tiles of `blocks`
    /// blocks, of which `first` is the first.
    void add(const void* tiles, int64_t first, int64_t blocks, int64_t group, int64_t column) const {
        constexpr int64_t bytes = kPair * sizeof(float), tile = kTilePairs * lanes;
        alignas(64) float sums[4 * tile];
        for (int64_t pair = 0; pair < x_.n_pairs; pair += 2 * kTilePairs) {
            const auto* const a = reinterpret_cast<const char*>(x_.weights + pair * kPair);
            const int64_t left = x_.n_pairs - pair, n = left < 2 * kTilePairs ? left : 2 * kTilePairs;
            x_.tiles->multiply({.a = a + first * kBlockTokens * 2,
                                .a_stride = bytes,
                                .a_next = n > kTilePairs ? kTilePairs * bytes : 0,
                                .b = tiles,
                                .b_stride = 2 * lanes * sizeof(float),
                                .b_next = lanes * sizeof(float),
                                .steps = blocks},
                               sums);
            for (int64_t i = 0; i < n; ++i) {
                float* const to = x_.out + x_.pairs[pair + i] * x_.out_stride + column;
                const float* const from = sums + i / kTilePairs * 2 * tile + i % kTilePairs * lanes;
                const float factor = x_.factor[pair + i];
                const Vec offset = splat(offsets_[group * stride_ + pair + i]);
                for (int j = 0; j < 2; ++j) {
                    const Vec added = load(from + j * tile) + offset;
                    float* const at = to + j * lanes;
                    store(at, factor == 0 ? added : fma(splat(factor), load(at), added));
                }
            }
        }
    }

  private:
    /// Floats from pair to pair: not a power of 2, so that the rows of a tile do not meet in the same places
    /// of L1.
    static constexpr int64_t kPair = kAbsorbedRows + 16;

    const AbsorbedValues& x_;
    int64_t stride_;
    float* offsets_;
};

/// Prefetches one of `shares` of the block that is read when this one is done, into L2.
inline void prefetch_share(const AbsorbedValues& x, int64_t block, int64_t share, int64_t shares) {
    constexpr int64_t kLine = 64;
    const char* const next = static_cast<const char*>(x.next[block]);
    if (!next) return;
    const int64_t bytes = x.heads * static_cast<int64_t>(x.head_stride), end = (share + 1) * bytes / shares;
    for (int64_t at = share * bytes / shares / kLine * kLine; at < end; at += kLine)
        __builtin_prefetch(next + at, 0, 2);
}

/// Rows of whole groups of kQ4Columns columns.
inline void absorb_q4_by_tiles(const AbsorbedValues& x) {
    constexpr int64_t kHalf = kQ4Columns / 2;  // the two halves of a group share bytes
    const int64_t first = x.first / kBlockTokens, end = (x.first + x.n + kBlockTokens - 1) / kBlockTokens;
    alignas(64) char tiles[kAbsorbedBlocks * kTiledGroup];
    x.tiles->begin();
    TiledWeights weights(x);
    Q4Scales some;
    for (int64_t group = 0, groups = q4_groups(x); group < groups; group += lanes) {
        const int64_t n = groups - group < lanes ? groups - group : lanes;
        some.read(x, group, n);
        weights.find_offsets(some.middles[0]);
        for (int64_t i = 0; i < n; ++i) {
            const Q4Place at(x, group + i);
            for (int64_t block = first; block < end; ++block) {
                prefetch_share(x, block, group + i, groups);
                x.tiles->fill_q4({.codes = head_of(x, block, at.head) + at.group * kHalf,
                                  .stride = x.dim / 2,
                                  .scales = some.scales[i] + block * kBlockTokens},
                                 tiles + (block - first) * kTiledGroup);
            }
            weights.add(tiles, first, end - first, i, (group + i) * kQ4Columns);
        }
    }
    x.tiles->end();
}

}  // namespace
}  // namespace slimrt::cpu::SLIMRT_ISA
