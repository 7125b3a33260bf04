// Weighted sums of absorbed rows of codes: a strip of columns of some rows, which stays in L1, serves all
// (head, query) pairs. For the units compiled once per ISA.
#pragma once

#include "kernels/cpu/attention_weights.h"

namespace slimrt::cpu::SLIMRT_ISA {
namespace {

/// kStripColumns columns of all rows, transposed: rows_per_lane rows of a column are adjacent. start: what
/// the sums start from.
struct Strip {
    alignas(64) RowCodes codes[kStripLanes][absorbed_vectors];
    RowSums start[absorbed_vectors];
    int64_t first, end;     // lanes in use, of kStripLanes
    int64_t column, left;   // column: the first, within whole rows; left: columns of the head from there on
    int64_t index, strips;  // the number of this strip; how many there are
};

/// Sets the fields of strip number `at`; every stored head is divided into strips of `columns` columns.
inline void place_strip(const AbsorbedValues& x, int64_t at, int64_t columns, Strip& to) {
    const int64_t of_head = (x.dim + columns - 1) / columns, column = at % of_head * columns;
    to.first = x.first / rows_per_lane;
    to.end = (x.first + x.n + rows_per_lane - 1) / rows_per_lane;
    to.column = at / of_head * x.dim + column;
    to.left = x.dim - column < columns ? x.dim - column : columns;
    to.index = at;
    to.strips = x.heads * of_head;
}

/// fn(address of the first row of a lane, destination) for all lanes of a strip; rows are `stride` bytes
/// apart and start at `first` in their stored head.
template <class Fn>
void each_lane(const AbsorbedValues& x, int64_t head, int64_t first, int64_t stride, Strip& to,
               const Fn& fn) {
    constexpr int64_t kOfBlock = kBlockTokens / rows_per_lane;
    for (int64_t i = to.first, next; i < to.end; i = next) {
        next = i / kOfBlock * kOfBlock + kOfBlock < to.end ? i / kOfBlock * kOfBlock + kOfBlock : to.end;
        const char* from = head_of(x, i / kOfBlock, head) + i % kOfBlock * rows_per_lane * stride + first;
        for (int64_t k = i; k < next; ++k, from += rows_per_lane * stride) fn(from, to.codes[k]);
    }
}

/// Sets what the sums start from: weights are stored minus weight_zero_point, and weight_zero_point times the
/// sum of each column makes up for it.
inline void find_start(Strip& strip) {
    for (RowSums& sums : strip.start) sums = zero_sums(RowCodes{});
    if constexpr (weight_zero_point != 0) {
        // Half of weight_zero_point, which does not fit int8.
        const RowCodes half = splat_quad(RowCodes{}, "\x40\x40\x40\x40");
        RowSums start[absorbed_vectors];
        memcpy(start, strip.start, sizeof start);
        for (int64_t i = strip.first; i < strip.end; ++i)
            for (int twice = 0; twice < 2; ++twice)
                for (int j = 0; j < absorbed_vectors; ++j)
                    start[j] = add_products(start[j], half, strip.codes[i][j]);
        memcpy(strip.start, start, sizeof start);
    }
}

/// A tile of products prefetches in this many steps, about a line in each.
constexpr int64_t kPrefetchSteps = registers == 32 ? 8 : 4;

/// Prefetches a strip's share of the rows that are read after these.
class NextRowsPrefetch {
  public:
    NextRowsPrefetch(const AbsorbedValues& x, int64_t strip, int64_t strips)
        : next_(x.next),
          share_(x.heads * static_cast<int64_t>(x.head_stride) / strips),
          first_(strip * share_),
          of_pair_(x.rows / kBlockTokens * share_ / x.n_pairs) {}

    /// The share of the next `pairs` pairs, in `steps` steps.
    PrefetchSteps take(int64_t pairs, int64_t steps) {
        const auto* const block = static_cast<const char*>(*next_);
        PrefetchSteps lines;
        if (block) lines = {block + first_ + done_, pairs * of_pair_ / steps};
        done_ += pairs * of_pair_;
        if (done_ >= share_) done_ -= share_, ++next_;
        return lines;
    }

  private:
    const void* const* next_;
    int64_t share_, first_, of_pair_, done_ = 0;  // in bytes of a block
};

/// Adds V vectors of columns for Q pairs; if Part, one vector with `left` elements, perhaps all.
template <int Q, int V, bool Part, bool offsets>
void add_tile(const AbsorbedValues& x, const Weights& weights, int64_t pair, const Strip& strip,
              int64_t vector, PrefetchSteps ahead) {
    float* const out = x.out + strip.column + vector * lanes;
    RowSums acc[Q][V];
#pragma GCC unroll 8
    for (int k = 0; k < Q; ++k) {
#pragma GCC unroll 4
        for (int j = 0; j < V; ++j) acc[k][j] = strip.start[vector + j];
    }
#pragma GCC unroll 8
    for (int k = 0; k < Q; ++k) {  // the outputs are in L2
#pragma GCC unroll 4
        for (int j = 0; j < V; ++j)
            __builtin_prefetch(out + x.pairs[pair + k] * x.out_stride + j * lanes, 1, 3);
    }
    const int64_t step = x.rows / rows_per_lane / kPrefetchSteps;
    const WeightCode* from = weights.codes(pair) + strip.first * rows_per_lane;
    const RowCodes* codes_at = strip.codes[strip.first] + vector;
    for (int64_t i = strip.first, next; i < strip.end; i = next) {
        ahead.step();
        next = i + step < strip.end ? i + step : strip.end;
        for (const RowCodes* const end = codes_at + (next - i) * absorbed_vectors; codes_at < end;) {
            RowCodes codes[V];
#pragma GCC unroll 4
            for (int j = 0; j < V; ++j) codes[j] = codes_at[j];
#pragma GCC unroll 8
            for (int k = 0; k < Q; ++k) {
                const RowCodes some = splat_quad(RowCodes{}, from + k * kAbsorbedRows);
#pragma GCC unroll 4
                for (int j = 0; j < V; ++j) acc[k][j] = add_products(acc[k][j], some, codes[j]);
            }
            from += rows_per_lane;
            codes_at += absorbed_vectors;
            asm("" : "+r"(from), "+r"(codes_at));  // g++ 12 would recompute both addresses from their parts
        }
    }
    const int64_t columns = strip.left - vector * lanes, left = columns < lanes ? columns : lanes;
#pragma GCC unroll 8
    for (int k = 0; k < Q; ++k) {
        const Vec unit = splat(weights.unit(pair + k));
        const Vec offset = splat(offsets ? weights.offset(pair + k) : 0);
        const float factor = x.factor[pair + k];
        float* const to = out + x.pairs[pair + k] * x.out_stride;
#pragma GCC unroll 4
        for (int j = 0; j < V; ++j) {
            const Vec sum = to_floats(acc[k][j]), added = offsets ? fma(sum, unit, offset) : sum * unit;
            float* const at = to + j * lanes;
            const auto read = [&] { return Part ? load_part(at, left) : load(at); };
            const Vec all = factor == 0 ? added : fma(splat(factor), read(), added);
            Part ? store_part(at, all, left) : store(at, all);
        }
    }
}

/// Adds V vectors for all pairs: Q at a time, then half as many, then one.
template <int Q, int V, bool Part, bool offsets>
void add_vectors(const AbsorbedValues& x, const Weights& weights, const Strip& strip, int64_t vector) {
    NextRowsPrefetch ahead(x, strip.index, strip.strips);
    int64_t pair = 0;
    const auto with = [&](auto kernel, int64_t n) {
        for (; pair + n <= x.n_pairs; pair += n)
            kernel(x, weights, pair, strip, vector,
                   vector == 0 ? ahead.take(n, kPrefetchSteps) : PrefetchSteps());
    };
    with(add_tile<Q, V, Part, offsets>, Q);
    if constexpr (Q > 4) with(add_tile<Q / 2, V, Part, offsets>, Q / 2);
    with(add_tile<1, V, Part, offsets>, 1);
}

/// Adds the outliers of all pairs, after the other weights: the outputs are in the caches by then.
template <int V, bool Part>
[[gnu::noinline]] void add_outliers(const AbsorbedValues& x, const Strip& strip, const Weights& weights,
                                    int64_t vector) {
    static constexpr struct Digits {
        WeightCode only[rows_per_lane][rows_per_lane];
        constexpr Digits() : only() {
            for (int i = 0; i < rows_per_lane; ++i) only[i][i] = 1;
        }
    } kOne;
    const int64_t columns = strip.left - vector * lanes, left = columns < lanes ? columns : lanes;
    const Outlier* const outliers = weights.outliers();
    for (int64_t i = 0, n = weights.n_outliers(); i < n;) {
        const int32_t pair = outliers[i].pair;
        float* const to = x.out + pair * x.out_stride + strip.column + vector * lanes;
        Vec sums[V];
#pragma GCC unroll 4
        for (int j = 0; j < V; ++j) sums[j] = Part ? load_part(to + j * lanes, left) : load(to + j * lanes);
        do {
            const auto row = static_cast<uint32_t>(outliers[i].row);
            const RowCodes one = splat_quad(RowCodes{}, kOne.only[row % rows_per_lane]);
            const RowCodes* const codes = strip.codes[row / rows_per_lane] + vector;
            const Vec weight = splat(weights.outlier(i));
#pragma GCC unroll 4
            for (int j = 0; j < V; ++j)
                sums[j] = fma(weight, to_floats(add_products(zero_sums(RowCodes{}), one, codes[j])), sums[j]);
        } while (++i < n && outliers[i].pair == pair);
#pragma GCC unroll 4
        for (int j = 0; j < V; ++j)
            Part ? store_part(to + j * lanes, sums[j], left) : store(to + j * lanes, sums[j]);
    }
}

/// Adds a strip for all pairs, as many vectors at a time as possible.
template <int vectors, bool offsets>
void add_strip(const AbsorbedValues& x, const Strip& strip, const Weights& weights) {
    const int64_t most = strip.left / lanes;
    if constexpr (vectors >= 4 && registers == 32) {
        if (most >= 4) {
            add_vectors<4, 4, false, offsets>(x, weights, strip, 0);
            return add_outliers<4, false>(x, strip, weights, 0);
        }
    } else if constexpr (vectors == 2 && registers == 32) {
        add_vectors<8, 2, false, offsets>(x, weights, strip, 0);
        return add_outliers<2, false>(x, strip, weights, 0);
    }
    int64_t vector = 0;
    for (; most - vector >= 2; vector += 2) add_vectors<4, 2, false, offsets>(x, weights, strip, vector);
    for (; vector * lanes < strip.left; ++vector) add_vectors<4, 1, true, offsets>(x, weights, strip, vector);
    for (vector = 0; vector * lanes < strip.left; ++vector) add_outliers<1, true>(x, strip, weights, vector);
}

}  // namespace
}  // namespace slimrt::cpu::SLIMRT_ISA
