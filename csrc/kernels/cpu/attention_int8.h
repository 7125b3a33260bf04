// Scores and values of Int8 rows by integer products, where the ISA has fast ones (integer_scores), and
// scores of codes of few bits (integer_channels). For the units compiled once per ISA.
#pragma once

#include "kernels/cpu/attention_codes.h"

namespace slimrt::cpu::SLIMRT_ISA {
namespace {

constexpr int64_t kCodes = 4 * lanes;  // codes in a vector

/// Queries as floats and, if not nullptr, packed by pack_query().
struct Queries {
    const float* floats;
    const char* packed;
    int64_t dim;

    Queries from(int64_t m) const {
        return {floats + m * dim, packed ? packed + m * packed_query_bytes(dim) : nullptr, dim};
    }
};

/// Element types whose scores are computed by integers.
template <class Rows>
constexpr bool has_integer_scores = integer_scores && (Rows::is_int8 || (integer_channels && is_codes<Rows>));

/// Rows of Int8 with a scale each, whose queries are packed without exception.
template <class Rows>
constexpr bool always_packed = integer_scores && Rows::is_int8 && Rows::packed;

/// Vectors of codes that are loaded at a time: one of Int8, a group of few-bit codes.
template <class At>
constexpr int vectors_of = 1;
template <int bits>
constexpr int vectors_of<CodeAt<bits>> = 32 / kCodes;

template <class Stored, class Codes>
void read_codes(const Stored* row, Codes (&to)[1]) {
    to[0] = load_biased(row);
}
template <int bits, class Codes, int n>
void read_codes(CodeAt<bits> row, Codes (&to)[n]) {
    unpack_group(FewBits<bits>(), row.row + row.column / 32 * (4 * bits), to);
}

/// Whether integer products prefetch in steps: with shorter vectors the steps would cost too much.
constexpr bool integers_in_steps = kCodes == 64;
/// A step is made for a vector of so many rows.
constexpr int64_t kStepRows = 2;

/// dots_tile() with integers. ahead: if integers_in_steps.
template <int Q, class Rows, class Some = Int8>
void integer_dots_tile(Queries q, Rows rows, int64_t n, float scale, float* out, PrefetchSteps ahead) {
    constexpr int R = tile / Q, half = R / 2, vectors = vectors_of<decltype(rows.row(0))>;
    using Codes = decltype(load_biased(static_cast<const Some*>(nullptr)));
    using Sums = decltype(zero_sums(Codes{}));
    const int64_t dim = q.dim, whole = dim / (kCodes * vectors) * (kCodes * vectors);
    const int8_t *high[Q], *low[Q];
    const PackedQuery* query[Q];
    for (int m = 0; m < Q; ++m) {
        query[m] = reinterpret_cast<const PackedQuery*>(q.from(m).packed);
        high[m] = reinterpret_cast<const int8_t*>(query[m] + 1);
        low[m] = high[m] + packed_digits(dim);
    }
    Vec dots[tile];
#pragma GCC unroll 2
    for (int first = 0; first < R; first += half) {
        Sums highs[Q][half], lows[Q][half];
#pragma GCC unroll 4
        for (int m = 0; m < Q; ++m) {
#pragma GCC unroll 8
            for (int i = 0; i < half; ++i) {
                highs[m][i] = zero_sums(Codes{});
                lows[m][i] = load_sums(Codes{}, query[m]->start);
            }
        }
        const auto step = [&](int64_t d, auto read) {
#pragma GCC unroll 8
            for (int i = 0; i < half; ++i) {
                Codes codes[vectors];
                read(rows.row(Rows::packed || first + i < n ? first + i : n - 1) + d, codes);
                if (integers_in_steps && i % kStepRows == 0) ahead.step();
#pragma GCC unroll 2
                for (int k = 0; k < vectors; ++k) {
#pragma GCC unroll 4
                    for (int m = 0; m < Q; ++m) {
                        highs[m][i] = add_dots(highs[m][i], codes[k], high[m] + d + k * kCodes);
                        lows[m][i] = add_dots(lows[m][i], codes[k], low[m] + d + k * kCodes);
                    }
                }
            }
        };
        // The remainder comes first, while the sums need not be in registers: its loads may call memcpy.
        if constexpr (Rows::is_int8) {
            if (whole < dim)
                step(whole, [left = dim - whole](auto p, auto& to) { to[0] = load_biased_part(p, left); });
        }
        for (int64_t d = 0; d < whole; d += kCodes * vectors)
            step(d, [](auto p, auto& to) { read_codes(p, to); });
#pragma GCC unroll 4
        for (int m = 0; m < Q; ++m) {
#pragma GCC unroll 8
            for (int i = 0; i < half; ++i) dots[m * R + first + i] = join_digits(highs[m][i], lows[m][i]);
        }
    }
    float all[tile];
    for (int m = 0; m < Q; ++m) {
        const float factor = scale * query[m]->scale;
        float* const to = out + m * kBlockTokens;
        if constexpr (R % lanes == 0) {
#pragma GCC unroll 4
            for (int i = 0; i < R; i += lanes) {
                const Vec some = sums(dots + m * R + i) * splat(factor);
                if (n >= i + lanes)
                    store(to + i, some);
                else if (n > i)
                    store_part(to + i, some, n - i);
            }
        } else {
            if (m * R % lanes == 0) store(all + m * R, sums(dots + m * R));
            for (int i = 0; i < R && i < n; ++i) to[i] = all[m * R + i] * factor;
        }
    }
}

/// For scores: with few lanes horizontal sums are cheaper than transposing rows.
constexpr bool transposes_scores = lanes > 4;
/// Transposing rows pays from this many queries on.
constexpr int64_t kMinQueriesToTranspose = lanes > 4 ? 2 : 1;
constexpr int64_t kMaxTransposedDim = 1280;  // the whole rows of an encoder fit

/// For values, also of one query: a quarter of the instructions of widening codes to floats.
inline bool transposes_values(int64_t dim) { return dim % 64 == 0 && dim <= kMaxTransposedDim; }
inline bool worth_transposing(int64_t n_q, int64_t dim) {
    return n_q >= kMinQueriesToTranspose && transposes_values(dim);
}

/// Rows that are transposed at a time, one for each lane of the sums.
constexpr int64_t kTransposedRows = 16;

/// Scores of Q queries for kTransposedRows rows; codes[k] has columns 4 k ... 4 k + 3 of each.
template <int Q, class Codes>
void transposed_scores(Queries q, const Codes* codes, float scale, Prefetch* next, float* s) {
    using Sums = decltype(zero_sums(Codes{}));
    const int8_t *high[Q], *low[Q];
    const PackedQuery* query[Q];
    Sums highs[Q], lows[Q];
#pragma GCC unroll 8
    for (int m = 0; m < Q; ++m) {
        query[m] = reinterpret_cast<const PackedQuery*>(q.from(m).packed);
        high[m] = reinterpret_cast<const int8_t*>(query[m] + 1);
        low[m] = high[m] + packed_digits(q.dim);
        highs[m] = zero_sums(Codes{});
        lows[m] = splat_sums(Codes{}, query[m]->total);
    }
    for (int64_t d = 0; d < q.dim; d += 64) {
        PrefetchSteps ahead;
        if (next) ahead = next->in_steps(64 * kTransposedRows, integers_in_steps ? 64 : 0);
        for (int64_t k = d / 4; k < d / 4 + 16; ++k) {
            if constexpr (integers_in_steps) ahead.step();
#pragma GCC unroll 8
            for (int m = 0; m < Q; ++m) {
                highs[m] = add_products(highs[m], codes[k], splat_quad(Codes{}, high[m] + 4 * k));
                lows[m] = add_products(lows[m], codes[k], splat_quad(Codes{}, low[m] + 4 * k));
            }
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < Q; ++m)
        store(s + m * kBlockTokens, join_digits(highs[m], lows[m]) * splat(scale * query[m]->scale));
}

/// All kBlockTokens rows of a block; if there are only n, copied to `to` and padded with zeros.
template <class Rows>
RowsOf<Int8> whole_block(const Rows& rows, int64_t n, int64_t dim, Int8* to) {
    if (n == kBlockTokens) return {rows.row(0), rows.stride};
    for (int64_t i = 0; i < kBlockTokens; ++i) {
        Int8* const row = to + i * dim;
        i < n ? memcpy(row, rows.row(i), static_cast<size_t>(dim)) : memset(row, 0, static_cast<size_t>(dim));
    }
    return {to, static_cast<size_t>(dim)};
}

/// s[m][i] = scale * q[m] . rows[i] of many queries and a whole block.
template <class Rows>
void integer_scores_of(Queries q, int64_t n_q, const Rows& rows, float scale, Prefetch& next, float* s) {
    using Codes = decltype(load_biased(rows.row(0)));
    Codes codes[kMaxTransposedDim / 4];
    for (int64_t first = 0; first < kBlockTokens; first += kTransposedRows) {
        for (int64_t d = 0; d < q.dim; d += 64) {
            Codes* const to = codes + d / 4;
            const auto* row = rows.row(first) + d;
            for (int64_t i = 0; i < kTransposedRows; ++i, row += rows.stride) to[i] = load_biased(row);
            transpose(to);
        }
        int64_t m = 0;
        const auto with = [&](auto kernel, int64_t step) {
            kernel(q.from(m), codes, scale, m == 0 ? &next : nullptr, s + m * kBlockTokens + first);
            m += step;
        };
        while (m + 8 <= n_q) with(transposed_scores<8, Codes>, 8);
        while (m + 4 <= n_q) with(transposed_scores<4, Codes>, 4);
        while (m + 2 <= n_q) with(transposed_scores<2, Codes>, 2);
        if (m < n_q) with(transposed_scores<1, Codes>, 1);
    }
}

/// Softmax weights of a block quantised to about 15 bits of the largest: unit * (128 high + low). lowest:
/// what is added to the sum of every column.
struct QuantisedWeights {
    uint8_t high[kBlockTokens], low[kBlockTokens];
    float unit, lowest;
};

/// Returns false if a weight is not finite.
inline bool split_weights(const float* p, int64_t n, QuantisedWeights* digits) {
    constexpr float kMaxCode = 127 * 128, magic = 0x1p23f;  // adding it rounds to integers
    uint32_t bits[kBlockTokens] = {}, max_bits = 0;
    memcpy(bits, p, static_cast<size_t>(n) * sizeof(float));
    for (int i = 0; i < kBlockTokens; ++i) max_bits = bits[i] > max_bits ? bits[i] : max_bits;
    float top, weights[kBlockTokens];
    memcpy(&top, &max_bits, sizeof top);
    memcpy(weights, bits, sizeof weights);
    if (!(top < 0x1p100f)) return false;
    const float shrink = top > 0x1p-100f ? kMaxCode / top : 0;
    digits->unit = top / kMaxCode;
    digits->lowest = 0;
    for (int i = 0; i < kBlockTokens; ++i) {
        const uint32_t code =
            static_cast<uint32_t>(static_cast<int32_t>(weights[i] * shrink + magic - magic));
        digits->high[i] = static_cast<uint8_t>(code >> 7);
        digits->low[i] = static_cast<uint8_t>(code & 127);
    }
    return true;
}

/// out = factor * out + weights * rows for V vectors of columns of Q queries, whose digits are `stride`
/// apart; the rows are transposed to quads of four rows. ahead: of one query, if integers_in_steps.
template <int Q, int V, class Rows, class Codes>
void integer_columns(const Product<Rows>& x, int64_t m, int64_t column, const QuantisedWeights* digits,
                     int64_t stride, const Codes (*quads)[4], PrefetchSteps ahead) {
    using Sums = decltype(zero_sums(Codes{}));
    Sums highs[Q][V], lows[Q][V];
#pragma GCC unroll 2
    for (int k = 0; k < Q; ++k) {
#pragma GCC unroll 4
        for (int j = 0; j < V; ++j) highs[k][j] = lows[k][j] = zero_sums(Codes{});
    }
    int64_t n = kBlockTokens / 4;
    if constexpr (lanes < 16) asm("" : "+r"(n));  // keeps the loop rolled: unrolled it would spill registers
    for (int64_t t = 0; t < n; ++t) {
        if constexpr (integers_in_steps && Q == 1) ahead.step();
#pragma GCC unroll 2
        for (int k = 0; k < Q; ++k) {
            const Codes high = splat_quad(Codes{}, digits[k * stride].high + 4 * t);
            const Codes low = splat_quad(Codes{}, digits[k * stride].low + 4 * t);
#pragma GCC unroll 4
            for (int j = 0; j < V; ++j) {
                highs[k][j] = add_products(highs[k][j], high, quads[t][j]);
                lows[k][j] = add_products(lows[k][j], low, quads[t][j]);
            }
        }
    }
#pragma GCC unroll 2
    for (int k = 0; k < Q; ++k) {
        const float factor = x.factor[(m + k) * x.factor_step];
        float* const out = x.out + (m + k) * x.out_stride + column;
#pragma GCC unroll 4
        for (int j = 0; j < V; ++j) {
            const Vec added = fma(join_digits(highs[k][j], lows[k][j]), splat(digits[k * stride].unit),
                                  splat(digits[k * stride].lowest));
            float* const to = out + j * lanes;
            store(to, factor == 0 ? added : fma(splat(factor), load(to), added));
        }
    }
}

/// out = factor * out + weights * rows for a multiple of 64 columns of a whole block, of which the first x.n
/// rows have weights. Returns false, without effect, if a weight is not finite.
template <class Rows>
bool integer_values(const Product<Rows>& x, int64_t dim, Prefetch& next) {
    using Codes = decltype(load_biased(x.rows.row(0)));
    QuantisedWeights digits[64];
    for (int64_t m = 0; m < x.n_q; ++m) {
        if (!split_weights(x.p + m * x.ld, x.n, digits + m)) return false;
    }
    for (int64_t column = 0; column < dim; column += kCodes) {
        Codes quads[kBlockTokens / 4][4];
        auto rows = x.rows.at(0, column);
        // Of one query half of them here, half beside the products.
        const bool halves = integers_in_steps && x.n_q == 1;
        PrefetchSteps ahead = next.in_steps(kCodes * kBlockTokens, halves ? 2 * kCodes : 4 * kCodes);
        for (auto& quad : quads) {
            ahead.step();
            transpose_rows(rows, quad);
            rows = rows.at(4, 0);
        }
        int64_t m = 0;
        const auto with = [&](auto kernel, int64_t step) {
            kernel(x, m, column, digits + m, 1, quads, halves ? ahead : PrefetchSteps());
            m += step;
        };
        while (m + 2 <= x.n_q) with(integer_columns<2, 4, Rows, Codes>, 2);
        if (m < x.n_q) with(integer_columns<1, 4, Rows, Codes>, 1);
    }
    return true;
}

}  // namespace
}  // namespace slimrt::cpu::SLIMRT_ISA
