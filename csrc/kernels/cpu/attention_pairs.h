// Weighted sums of absorbed rows of any type. A strip of columns of some rows is converted once for all
// (head, query) pairs: to floats, or to int16 with two rows of a column adjacent, where such products are
// faster. For the units compiled once per ISA.
#pragma once

#include "kernels/cpu/attention_strips.h"

namespace slimrt::cpu::SLIMRT_ISA {
namespace {

constexpr int64_t kPairColumns = 32;
constexpr int64_t kPairVectors = kPairColumns / lanes;

/// Dequantises columns [column, column + n) of whole rows, kPairColumns floats apart.
inline void read_strip(const AbsorbedValues& x, int64_t column, int64_t n, float* to) {
    const HeadBytes bytes = head_bytes(DType(x.type), x.dim);
    const auto stride = static_cast<int64_t>(bytes.elements), scales = static_cast<int64_t>(bytes.scales);
    for (int64_t row = x.first, next, end = x.first + x.n; row < end; row = next) {
        const int64_t block = row / kBlockTokens, at = row % kBlockTokens;
        next = (block + 1) * kBlockTokens < end ? (block + 1) * kBlockTokens : end;
        for (int64_t c = 0, some; c < n; c += some) {
            const int64_t first = (column + c) % x.dim;
            some = x.dim - first < n - c ? x.dim - first : n - c;
            const char* const head = head_of(x, block, (column + c) / x.dim);
            load_head(x.type, head + at * stride, bytes.elements, head + kBlockTokens * stride + at * scales,
                      next - row, x.dim, first, some, to + row * kPairColumns + c, kPairColumns);
        }
    }
}

// By Cauchy-Schwarz a sum of products is at most the product of the norms of its factors, which are scaled to
// these: their product is below 2^31.
constexpr float kWeightNorm = 65000, kRowNorm = 32700, kInt16Max = 32767;

/// The factor that makes numbers integers, and its inverse: 0, or NaN, if the sum of squares is out of range.
struct PairScale {
    float shrink, unit;
};
inline PairScale pair_scale(float squares, float norm) {
    const bool usable = squares >= 0x1p-100f && squares <= 0x1p100f;
    const float size = __builtin_sqrtf(usable ? squares : 1);
    return {usable ? norm / size : 0, usable ? size / norm : squares < 1 ? 0 : __builtin_nanf("")};
}

/// Softmax weights as int16.
struct PairWeights {
    int16_t* codes;  // [pair][kAbsorbedRows]
    float* units;

    explicit PairWeights(const AbsorbedValues& x)
        : codes(reinterpret_cast<int16_t*>(x.weights)), units(x.weights + x.n_pairs * kAbsorbedRows / 2) {}

    void quantise(const AbsorbedValues& x) {
        for (int64_t pair = 0; pair < x.n_pairs; ++pair) {
            const float* const p = x.p + pair * kAbsorbedRows;
            Vec squares = splat(0), high = splat(0);
            for (int64_t i = 0; i < x.rows; i += lanes) {
                squares = fma(load(p + i), load(p + i), squares);
                high = max(load(p + i), high);
            }
            PairScale scale = pair_scale(sum(squares), kWeightNorm);
            if (const float top = max_of(high); scale.shrink * top > kInt16Max)
                scale = {kInt16Max / top, top / kInt16Max};
            for (int64_t i = 0; i < x.rows; i += 2 * lanes)
                store_int16(codes + pair * kAbsorbedRows + i, load(p + i) * splat(scale.shrink),
                            load(p + i + lanes) * splat(scale.shrink));
            units[pair] = scale.unit;
        }
    }
};

/// The rows of a strip as read_strip() leaves them.
struct ReadStrip {
    const float* rows;
    static constexpr int64_t stride = kPairColumns;

    const float* row(int64_t i) const { return rows + i * kPairColumns; }
};

/// The rows of a strip where they are stored (F16, BF16): converting twice is cheaper than storing floats.
template <class Number>
struct StoredStrip {
    const AbsorbedValues& x;
    int64_t group, column, stride;

    StoredStrip(const AbsorbedValues& values, int64_t first)
        : x(values), group(first / x.dim), column(first % x.dim), stride(x.dim) {}

    const Number* row(int64_t i) const {
        const char* const head = head_of(x, i / kBlockTokens, group);
        return reinterpret_cast<const Number*>(head) + i % kBlockTokens * stride + column;
    }
    /// Whether columns [first, first + n) are within one head, and rows come in twos.
    static bool fits(const AbsorbedValues& x, int64_t first, int64_t n) {
        return n == kPairColumns && first % x.dim + n <= x.dim && x.first % 2 == 0 && x.n % 2 == 0;
    }
};

/// The columns of a strip as int16, with a scale for each column.
template <class Pairs>
struct PairStrip {
    alignas(64) Pairs codes[kAbsorbedRows / 2][kPairVectors];
    alignas(64) float units[kPairColumns], shrinks[kPairColumns];
    int64_t first, end;  // in twos of rows

    template <class Rows>
    void fill(const AbsorbedValues& x, const Rows& rows) {
        first = x.first / 2;
        end = (x.first + x.n + 1) / 2;
        find_scales(rows);
        Vec shrink[kPairVectors];
        for (int j = 0; j < kPairVectors; ++j) shrink[j] = load(shrinks + j * lanes);
        each_two(rows, [&](int64_t i, auto* row) {
#pragma GCC unroll 4
            for (int j = 0; j < kPairVectors; ++j, row += lanes)
                codes[i][j] = Pairs::of(load(row), load(row + rows.stride), shrink[j]);
        });
    }

  private:
    /// do_one(i, row 2 i) for all twos of rows.
    template <class Rows, class Fn>
    void each_two(const Rows& rows, const Fn& do_one) const {
        constexpr int64_t kTwos = kBlockTokens / 2;
        for (int64_t i = first, next; i < end; i = next) {
            next = i / kTwos * kTwos + kTwos < end ? i / kTwos * kTwos + kTwos : end;
            const auto* row = rows.row(2 * i);
            for (int64_t k = i; k < next; ++k, row += 2 * rows.stride) do_one(k, row);
        }
    }

    template <class Rows>
    void find_scales(const Rows& rows) {
        Vec squares[2][kPairVectors];
#pragma GCC unroll 4
        for (int j = 0; j < kPairVectors; ++j) squares[0][j] = squares[1][j] = splat(0);
        each_two(rows, [&](int64_t, auto* row) {
#pragma GCC unroll 2
            for (int k = 0; k < 2; ++k) {
#pragma GCC unroll 4
                for (int j = 0; j < kPairVectors; ++j) {
                    const Vec some = load(row + k * rows.stride + j * lanes);
                    squares[k][j] = fma(some, some, squares[k][j]);
                }
            }
        });
        for (int j = 0; j < kPairVectors; ++j) store(shrinks + j * lanes, squares[0][j] + squares[1][j]);
        for (int64_t c = 0; c < kPairColumns; ++c) {
            const PairScale scale = pair_scale(shrinks[c], kRowNorm);
            shrinks[c] = scale.shrink;
            units[c] = scale.unit;
        }
    }
};

/// Adds V vectors of columns for Q pairs.
template <int Q, int V, class Pairs>
void add_pair_tile(const PairWeights& weights, int64_t pair, const PairStrip<Pairs>& strip, int64_t vector,
                   const AbsorbedValues& x, float* out, PrefetchSteps ahead) {
    RowSums acc[Q][V];
#pragma GCC unroll 8
    for (int k = 0; k < Q; ++k) {
#pragma GCC unroll 4
        for (int j = 0; j < V; ++j) acc[k][j] = zero_sums(RowCodes{});
    }
    const int64_t step = x.rows / 2 / kPrefetchSteps;
    const int16_t* from = weights.codes + pair * kAbsorbedRows + 2 * strip.first;
    const Pairs* codes_at = strip.codes[strip.first] + vector;
    for (int64_t i = strip.first, next; i < strip.end; i = next) {
        ahead.step();
        next = i + step < strip.end ? i + step : strip.end;
        for (const Pairs* const end = codes_at + (next - i) * kPairVectors; codes_at < end;) {
            Pairs codes[V];
#pragma GCC unroll 4
            for (int j = 0; j < V; ++j) codes[j] = codes_at[j];
#pragma GCC unroll 8
            for (int k = 0; k < Q; ++k) {
                const Pairs some = Pairs::splat(from + k * kAbsorbedRows);
#pragma GCC unroll 4
                for (int j = 0; j < V; ++j) acc[k][j] = Pairs::add_products(acc[k][j], some, codes[j]);
            }
            from += 2;
            codes_at += kPairVectors;
            asm("" : "+r"(from), "+r"(codes_at));  // as in add_tile()
        }
    }
#pragma GCC unroll 8
    for (int k = 0; k < Q; ++k) {
        const Vec unit = splat(weights.units[pair + k]);
        const float factor = x.factor[pair + k];
        float* const to = out + x.pairs[pair + k] * x.out_stride + vector * lanes;
#pragma GCC unroll 4
        for (int j = 0; j < V; ++j) {
            const Vec added = to_floats(acc[k][j]) * (unit * load(strip.units + (vector + j) * lanes));
            float* const at = to + j * lanes;
            store(at, factor == 0 ? added : fma(splat(factor), load(at), added));
        }
    }
}

/// Adds a strip for all pairs. Columns past the last of a row are written too: `out` has room for them.
template <class Pairs>
void add_pair_strip(const AbsorbedValues& x, int64_t column, const PairWeights& weights,
                    const PairStrip<Pairs>& strip) {
    constexpr int V = 2, Q = registers / 4;
    const int64_t strips = (x.heads * x.dim + kPairColumns - 1) / kPairColumns;
    NextRowsPrefetch rows_ahead(x, column / kPairColumns, strips);
    int64_t pair = 0;
    const auto with = [&](auto kernel, int64_t n) {
        for (; pair + n <= x.n_pairs; pair += n) {
            const PrefetchSteps ahead = rows_ahead.take(n, kPrefetchSteps);
            for (int64_t vector = 0; vector < kPairVectors; vector += V)
                kernel(weights, pair, strip, vector, x, x.out + column,
                       vector == 0 ? ahead : PrefetchSteps());
        }
    };
    with(add_pair_tile<Q, V, Pairs>, Q);
    if constexpr (Q > 4) with(add_pair_tile<Q / 2, V, Pairs>, Q / 2);
    with(add_pair_tile<1, V, Pairs>, 1);
}

/// The same in floats, for runs of pairs whose outputs are consecutive.
inline void add_exactly(const AbsorbedValues& x, int64_t column, int64_t n, const float* strip) {
    for (int64_t pair = 0, end; pair < x.n_pairs; pair = end) {
        end = pair + 1;
        while (end < x.n_pairs && x.pairs[end] == x.pairs[end - 1] + 1) ++end;
        values(x.p + pair * kAbsorbedRows + x.first, kAbsorbedRows, end - pair, x.factor + pair,
               static_cast<uint32_t>(DType::F32), strip + x.first * kPairColumns,
               kPairColumns * sizeof(float), x.n, n, x.out + x.pairs[pair] * x.out_stride + column,
               x.out_stride);
    }
}

}  // namespace
}  // namespace slimrt::cpu::SLIMRT_ISA
