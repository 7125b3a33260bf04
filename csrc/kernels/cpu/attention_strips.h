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
    int64_t head;           // the stored head it is of
    int64_t column, left;   // column: the first, within whole rows; left: columns of the head from there on
    int64_t index, strips;  // the number of this strip; how many there are
};

/// Sets the fields of strip number `at`; every stored head is divided into strips of `columns` columns.
inline void place_strip(const AbsorbedValues& x, int64_t at, int64_t columns, Strip& to) {
    const int64_t of_head = (x.dim + columns - 1) / columns, column = at % of_head * columns;
    to.first = x.first / rows_per_lane;
    to.end = (x.first + x.n + rows_per_lane - 1) / rows_per_lane;
    to.head = at / of_head;
    to.column = to.head * x.dim + column;
    to.left = x.dim - column < columns ? x.dim - column : columns;
    to.index = at;
    to.strips = x.heads * of_head;
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

/// Whether a strip is transposed beside the products of the one before, which leave the units for shuffles
/// idle: with 16 registers there is no room.
constexpr bool gathers_beside = registers == 32;

/// Transposes a strip, some lanes at a time. Rows(from): the rows of a lane, for transpose_rows().
template <class Rows>
class Gathering {
  public:
    /// rows: of the stored head, `stride` bytes apart, from byte `first` on. Nothing is to do without `to`.
    Gathering(const AbsorbedValues& x, Strip* to, int64_t first, Rows rows)
        : x_(x), to_(to), first_(first), rows_(rows), at_(to ? to->first : 0), end_(to ? to->end : 0) {}

    /// Divides what is left into so many steps.
    void divide(int64_t steps) { each_ = gathers_beside ? (end_ - at_ + steps - 1) / steps : 0; }
    void step() {
        if constexpr (gathers_beside)
            for (const int64_t stop = at_ + each_; at_ < stop && at_ < end_; ++at_) gather();
    }
    void finish() {
        for (; at_ < end_; ++at_) gather();
        if (to_) find_start(*to_);
    }

  private:
    void gather() {
        constexpr int64_t kOfBlock = kBlockTokens / rows_per_lane;
        const char* const head = head_of(x_, at_ / kOfBlock, to_->head) + first_;
        transpose_rows(rows_(head + at_ % kOfBlock * rows_per_lane * rows_.stride), to_->codes[at_]);
    }

    const AbsorbedValues& x_;
    Strip* to_;
    int64_t first_;
    Rows rows_;
    int64_t at_, end_, each_ = 0;  // lanes
};

/// Beside a tile of products other work is done in this many steps.
constexpr int64_t kSteps = registers == 32 ? 8 : 4;

/// Prefetches a strip's share of the rows that are read after these, in steps.
class NextRowsPrefetch {
  public:
    NextRowsPrefetch(const AbsorbedValues& x, int64_t strip, int64_t strips)
        : next_(x.next),
          end_(x.next + x.rows / kBlockTokens),
          share_(x.heads * static_cast<int64_t>(x.head_stride) / strips),
          first_(strip * share_) {}

    /// Divides all into so many steps, of at most a block's share each.
    void divide(int64_t steps) {
        const int64_t most = (end_ - next_) * share_, each = (most + steps - 1) / steps;
        each_ = each < share_ ? (each + kLine - 1) / kLine * kLine : share_;
    }
    [[gnu::always_inline]] void step() {
        if (next_ == end_ || !*next_) return;
        const char* const at = static_cast<const char*>(*next_) + first_ + done_;
        for (int64_t line = 0; line < each_; line += kLine) __builtin_prefetch(at + line, 0, 3);
        if ((done_ += each_) >= share_) done_ = 0, ++next_;
    }

  private:
    static constexpr int64_t kLine = 64;
    const void *const *next_, *const *end_;
    int64_t share_, first_, each_ = 0, done_ = 0;  // bytes of a block
};

/// What is done beside the products of a strip, in steps.
template <class Next>
struct Beside {
    NextRowsPrefetch rows;
    Next& strip;

    void divide(int64_t steps) {
        rows.divide(steps);
        strip.divide(steps);
    }
    [[gnu::always_inline]] void step() {
        rows.step();
        strip.step();
    }
};

/// Adds the outliers of a pair, in floats.
template <int V>
[[gnu::always_inline]] inline void add_outliers(const Weights& weights, int64_t pair, const Strip& strip,
                                                int64_t vector, Vec (&sums)[V]) {
    static constexpr struct Digits {
        WeightCode only[rows_per_lane][rows_per_lane];
        constexpr Digits() : only() {
            for (int i = 0; i < rows_per_lane; ++i) only[i][i] = 1;
        }
    } kOne;
    for (int64_t i = weights.first_outlier(pair), end = weights.first_outlier(pair + 1); i < end; ++i) {
        const auto row = static_cast<uint32_t>(weights.outliers()[i].row);
        const RowCodes one = splat_quad(RowCodes{}, kOne.only[row % rows_per_lane]);
        const RowCodes* const codes = strip.codes[row / rows_per_lane] + vector;
        const Vec weight = splat(weights.outlier(i));
#pragma GCC unroll 4
        for (int j = 0; j < V; ++j)
            sums[j] = fma(weight, to_floats(add_products(zero_sums(RowCodes{}), one, codes[j])), sums[j]);
    }
}

/// Adds V vectors of columns for Q pairs; if Part, one vector with `left` elements, perhaps all.
template <int Q, int V, bool Part, bool offsets, class Next>
void add_tile(const AbsorbedValues& x, const Weights& weights, int64_t pair, const Strip& strip,
              int64_t vector, Beside<Next>& beside) {
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
    const int64_t step = x.rows / rows_per_lane / kSteps;
    const WeightCode* from = weights.codes(pair) + strip.first * rows_per_lane;
    const RowCodes* codes_at = strip.codes[strip.first] + vector;
    for (int64_t i = strip.first, next; i < strip.end; i = next) {
        beside.step();
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
        Vec all[V];
#pragma GCC unroll 4
        for (int j = 0; j < V; ++j) {
            const Vec sum = to_floats(acc[k][j]), added = offsets ? fma(sum, unit, offset) : sum * unit;
            float* const at = to + j * lanes;
            const auto read = [&] { return Part ? load_part(at, left) : load(at); };
            all[j] = factor == 0 ? added : fma(splat(factor), read(), added);
        }
        add_outliers(weights, pair + k, strip, vector, all);
#pragma GCC unroll 4
        for (int j = 0; j < V; ++j)
            Part ? store_part(to + j * lanes, all[j], left) : store(to + j * lanes, all[j]);
    }
}

/// Adds V vectors for all pairs: Q at a time, then half as many, then one.
template <int Q, int V, bool Part, bool offsets, class Next>
void add_vectors(const AbsorbedValues& x, const Weights& weights, const Strip& strip, int64_t vector,
                 Next& next) {
    Beside<Next> beside = {NextRowsPrefetch(x, strip.index, strip.strips), next};
    if (vector == 0) beside.divide((x.n_pairs + Q - 1) / Q * kSteps);
    int64_t pair = 0;
    const auto with = [&](auto kernel, int64_t n) {
        for (; pair + n <= x.n_pairs; pair += n) kernel(x, weights, pair, strip, vector, beside);
    };
    with(add_tile<Q, V, Part, offsets, Next>, Q);
    if constexpr (Q > 4) with(add_tile<Q / 2, V, Part, offsets, Next>, Q / 2);
    with(add_tile<1, V, Part, offsets, Next>, 1);
}

/// Adds a strip for all pairs, as many vectors at a time as possible, and gathers the next beside it.
template <int vectors, bool offsets, class Next>
void add_strip(const AbsorbedValues& x, const Strip& strip, const Weights& weights, Next next) {
    const int64_t most = strip.left / lanes;
    int64_t vector = 0;
    if constexpr (vectors >= 4 && registers == 32) {
        if (most >= 4) {
            add_vectors<4, 4, false, offsets>(x, weights, strip, 0, next);
            return next.finish();
        }
    } else if constexpr (vectors == 2 && registers == 32) {
        add_vectors<8, 2, false, offsets>(x, weights, strip, 0, next);
        return next.finish();
    }
    for (; most - vector >= 2; vector += 2)
        add_vectors<4, 2, false, offsets>(x, weights, strip, vector, next);
    for (; vector * lanes < strip.left; ++vector)
        add_vectors<4, 1, true, offsets>(x, weights, strip, vector, next);
    next.finish();
}

}  // namespace
}  // namespace slimrt::cpu::SLIMRT_ISA
