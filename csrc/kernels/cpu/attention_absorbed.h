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

/// The query as the first row of a block meets it: what the cosines of the rows after it are multiplied with,
/// then what their sines are.
template <class Number>
void turn_query(const TurnedQuery* query, const float* first, int64_t dim, Number* to) {
    const float *const q = reinterpret_cast<const float*>(query + 1), *const across = q + dim;
    for (int64_t c = 0; c < dim; c += 2 * lanes) {
        Vec along[2], right[2];
        for (int i = 0; i < 2; ++i) {
            const int64_t at = c + i * lanes;
            const Vec cosine = load(first + at), sine = load(first + dim + at);
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

/// Products of a turned query with a vector of rows, `stride` bytes apart; turns: of the first of them.
template <class Stored>
Vec dots_of_floats(const float* query, const Stored* rows, int64_t stride, const float* turns, int64_t dim) {
    Vec acc[lanes];
#pragma GCC unroll 16
    for (Vec& sum : acc) sum = splat(0);
    for (int64_t c = 0; c < dim; c += lanes) {
        const Vec along = load(query + c), right = load(query + dim + c);
        const float* const turn = turns_at(turns, dim, 0, c);
        const FromOne row(stride);
        const char* four = reinterpret_cast<const char*>(rows + c);
#pragma GCC unroll 16
        for (int j = 0; j < lanes; ++j) {
            const float* const by = turn + j * 2 * kTurnColumns;
            const Vec q = fma(along, load(by), right * load(by + kTurnColumns));
            acc[j] = fma(q, load(reinterpret_cast<const Stored*>(row(j, four))), acc[j]);
        }
    }
    return sums(acc);
}

/// Rows of a head, `dim` columns: those past its own meet zeros.
struct TurnedRows {
    const char* data;
    int64_t stride;
    const int16_t* turns;
    int64_t dim;
};

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

/// Products of a turned query with a vector of rows; those beyond the last (not `whole`) repeat it.
template <bool whole>
Vec dots_of_rows(const int16_t* query, const TurnedRows& rows, int64_t first, int64_t n) {
    constexpr int64_t kColumns = 2 * lanes;
    RowSums acc[lanes];
#pragma GCC unroll 16
    for (RowSums& sums : acc) sums = no_sums(RowCodes{});
    const char* const data = rows.data + first * rows.stride;
    for (int64_t c = 0; c < rows.dim; c += kColumns) {
        const RowFactors along = load_factors(query + c), right = load_factors(query + rows.dim + c);
        const int16_t* const turn = turns_at(rows.turns, rows.dim, first, c);
        const FromOne at(rows.stride);
        const char* four = data + c;
#pragma GCC unroll 16
        for (int j = 0; j < lanes; ++j) {
            const int64_t beyond = whole ? 0 : first + j < n ? 0 : first + j - (n - 1);
            const auto* const codes = reinterpret_cast<const Int8*>(at(j, four) - beyond * rows.stride);
            const int16_t* const row = turn + j * 2 * kTurnColumns;
            const RowFactors q = turned(along, load_factors(row), right, load_factors(row + kTurnColumns));
            acc[j] = add_wide_products(acc[j], codes, q);
        }
    }
    Vec floats[lanes];
#pragma GCC unroll 16
    for (int j = 0; j < lanes; ++j) floats[j] = to_floats(acc[j]);
    return sums(floats);
}

/// kStripColumns columns of all rows, rows_in_lane rows of a column side by side; and what sums of their
/// products start from.
struct Strip {
    alignas(64) RowCodes codes[kStripLanes][absorbed_vectors];
    RowSums start[absorbed_vectors];
    int64_t first, end;  // of kStripLanes
};

/// Columns past the head's own are whatever follows in memory: at least the scales do.
inline void gather_strip(const AbsorbedValues& x, int64_t group, int64_t column, Strip& to) {
    to.first = x.first / rows_in_lane;
    to.end = (x.first + x.n + rows_in_lane - 1) / rows_in_lane;
    constexpr int64_t kOfBlock = kBlockTokens / rows_in_lane;
    const int64_t stride = x.dim;
    for (int64_t i = to.first, next; i < to.end; i = next) {
        next = i / kOfBlock * kOfBlock + kOfBlock < to.end ? i / kOfBlock * kOfBlock + kOfBlock : to.end;
        const char* from = head_of(x, i / kOfBlock, group) + i % kOfBlock * rows_in_lane * stride + column;
        for (int64_t k = i; k < next; ++k, from += rows_in_lane * stride)
            transpose_rows(RowsOf<Int8>{from, static_cast<size_t>(stride)}, to.codes[k]);
    }
    for (int j = 0; j < absorbed_vectors; ++j) to.start[j] = no_sums(RowCodes{});
    if constexpr (weight_zero != 0) {
        const RowCodes half = four_digits(RowCodes{}, "\x40\x40\x40\x40");  // of weight_zero
        RowSums start[absorbed_vectors];
        memcpy(start, to.start, sizeof start);
        for (int64_t i = to.first; i < to.end; ++i)
            for (int twice = 0; twice < 2; ++twice)
                for (int j = 0; j < absorbed_vectors; ++j)
                    start[j] = add_products(start[j], half, to.codes[i][j]);
        memcpy(to.start, start, sizeof start);
    }
}

/// What a tile of products calls for, a line or so in each of kCalls steps: of many at once the CPU drops
/// some.
constexpr int64_t kCalls = registers == 32 ? 8 : 4;
struct LinesAhead {
    const char* at = nullptr;
    int64_t bytes = 0;  // a step

    void step() {
        constexpr int64_t kLine = 64;
        for (int64_t line = 0; line < bytes; line += kLine) __builtin_prefetch(at + line, 0, 3);
        at += bytes;
    }
};

/// A strip's share of the rows that are read after these, which come from memory.
class RowsAhead {
  public:
    RowsAhead(const AbsorbedValues& x, int64_t strip, int64_t strips)
        : next_(x.next),
          share_(x.heads * static_cast<int64_t>(x.head_stride) / strips),
          first_(strip * share_),
          of_pair_(kAbsorbedBlocks * share_ / x.n_pairs) {}

    /// The part of the next so many pairs, in so many steps.
    LinesAhead take(int64_t pairs, int64_t steps) {
        const auto* const block = static_cast<const char*>(*next_);
        LinesAhead lines;
        if (block) lines = {block + first_ + done_, pairs * of_pair_ / steps};
        done_ += pairs * of_pair_;
        if (done_ >= share_) done_ -= share_, ++next_;
        return lines;
    }

  private:
    const void* const* next_;
    int64_t share_, first_, of_pair_, done_ = 0;  // bytes of a block
};

/// V vectors of columns of Q pairs, of which there is one with `left` elements, perhaps all, when Part.
template <int Q, int V, bool Part>
void add_tile(const AbsorbedValues& x, const Weights& weights, int64_t pair, const Strip& strip,
              int64_t vector, float* out, int64_t left, LinesAhead ahead) {
    RowSums acc[Q][V];
#pragma GCC unroll 8
    for (int k = 0; k < Q; ++k) {
#pragma GCC unroll 4
        for (int j = 0; j < V; ++j) acc[k][j] = strip.start[vector + j];
    }
#pragma GCC unroll 8
    for (int k = 0; k < Q; ++k) {  // what the sums are added to is in the second level
#pragma GCC unroll 4
        for (int j = 0; j < V; ++j)
            __builtin_prefetch(out + x.pairs[pair + k] * x.out_stride + j * lanes, 1, 3);
    }
    const WeightCode* from = weights.codes(pair) + strip.first * rows_in_lane;
    const RowCodes* codes_at = strip.codes[strip.first] + vector;
    for (int64_t i = strip.first, next; i < strip.end; i = next) {
        ahead.step();
        next = i + kStripLanes / kCalls < strip.end ? i + kStripLanes / kCalls : strip.end;
        for (const RowCodes* const end = codes_at + (next - i) * absorbed_vectors; codes_at < end;) {
            RowCodes codes[V];
#pragma GCC unroll 4
            for (int j = 0; j < V; ++j) codes[j] = codes_at[j];
#pragma GCC unroll 8
            for (int k = 0; k < Q; ++k) {
                const RowCodes some = four_digits(RowCodes{}, from + k * kAbsorbedRows);
#pragma GCC unroll 4
                for (int j = 0; j < V; ++j) acc[k][j] = add_products(acc[k][j], some, codes[j]);
            }
            from += rows_in_lane;
            codes_at += absorbed_vectors;
            asm("" : "+r"(from), "+r"(codes_at));  // g++ 12 would add them up anew from what they are made of
        }
    }
#pragma GCC unroll 8
    for (int k = 0; k < Q; ++k) {
        const Vec unit = splat(weights.unit(pair + k));
        const float factor = x.factor[pair + k];
        float* const to = out + x.pairs[pair + k] * x.out_stride;
#pragma GCC unroll 4
        for (int j = 0; j < V; ++j) {
            const Vec added = to_floats(acc[k][j]) * unit;
            float* const at = to + j * lanes;
            const auto read = [&] { return Part ? load_part(at, left) : load(at); };
            const Vec all = factor == 0 ? added : fma(splat(factor), read(), added);
            Part ? store_part(at, all, left) : store(at, all);
        }
    }
}

template <int V, bool Part>
void add_vectors(const AbsorbedValues& x, const Weights& weights, const Strip& strip, int64_t vector,
                 int64_t group, int64_t column, int64_t left) {
    const int64_t strips = (x.dim + kStripColumns - 1) / kStripColumns;
    float* const out = x.out + group * x.dim + column + vector * lanes;
    RowsAhead ahead(x, group * strips + column / kStripColumns, x.heads * strips);
    for (int64_t pair = 0; pair < x.n_pairs;) {
        const auto with = [&](auto kernel, int64_t n) {
            kernel(x, weights, pair, strip, vector, out, left,
                   vector == 0 ? ahead.take(n, kCalls) : LinesAhead());
            pair += n;
        };
        x.n_pairs - pair >= 4 ? with(add_tile<4, V, Part>, 4) : with(add_tile<1, V, Part>, 1);
    }
}

/// All pairs, as many vectors at once as there are.
inline void add_strip(const AbsorbedValues& x, int64_t group, int64_t column, const Strip& strip,
                      const Weights& weights) {
    const int64_t left = x.dim - column,
                  most = left / lanes < absorbed_vectors ? left / lanes : absorbed_vectors;
    int64_t vector = 0;
    const auto with = [&](auto kernel, int64_t n) {
        const int64_t columns = left - vector * lanes;
        kernel(x, weights, strip, vector, group, column, columns < lanes ? columns : lanes);
        vector += n;
    };
    if constexpr (absorbed_vectors >= 4 && registers == 32)
        if (most >= 4) return with(add_vectors<4, false>, 4);
    while (most - vector >= 2) with(add_vectors<2, false>, 2);
    while (vector < absorbed_vectors && vector * lanes < left) with(add_vectors<1, true>, 1);
}

}  // namespace
}  // namespace slimrt::cpu::SLIMRT_ISA
