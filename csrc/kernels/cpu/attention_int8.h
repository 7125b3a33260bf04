// Scores and values of Int8 rows with integer products, where the ISA has them (integer_scores). For the
// units compiled once per ISA.
#pragma once

#include "kernels/cpu/attention_heads.h"

namespace slimrt::cpu::SLIMRT_ISA {
namespace {

/// A q that is packed, or floats.
struct Queries {
    const float* floats;
    const char* packed;
    int64_t dim;

    Queries from(int64_t m) const { return {floats + m * dim, packed + m * packed_query_bytes(dim), dim}; }
};

/// As dots_tile() with integers.
template <int Q, class Rows>
void integer_dots_tile(Queries q, Rows rows, int64_t n, float scale, float* out) {
    constexpr int R = tile / Q, half = R / 2;
    using Codes = decltype(raised(rows.row(0)));
    using Sums = decltype(no_sums(Codes{}));
    const int64_t dim = q.dim, whole = dim / 64 * 64;
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
                highs[m][i] = no_sums(Codes{});
                lows[m][i] = load_sums(Codes{}, query[m]->start);
            }
        }
        const auto step = [&](int64_t d, auto read) {
#pragma GCC unroll 8
            for (int i = 0; i < half; ++i) {
                const Codes codes = read(rows.row(Rows::packed || first + i < n ? first + i : n - 1) + d);
#pragma GCC unroll 4
                for (int m = 0; m < Q; ++m) {
                    highs[m][i] = add_dots(highs[m][i], codes, high[m] + d);
                    lows[m][i] = add_dots(lows[m][i], codes, low[m] + d);
                }
            }
        };
        for (int64_t d = 0; d < whole; d += 64) step(d, [](auto p) { return raised(p); });
        if (whole < dim) step(whole, [left = dim - whole](auto p) { return raised_part(p, left); });
#pragma GCC unroll 4
        for (int m = 0; m < Q; ++m) {
#pragma GCC unroll 8
            for (int i = 0; i < half; ++i) dots[m * R + first + i] = joined(highs[m][i], lows[m][i]);
        }
    }
    float all[tile];
    store(all, sums(dots));
    for (int m = 0; m < Q; ++m) {
        for (int i = 0; i < R && i < n; ++i)
            out[m * block_rows + i] = all[m * R + i] * (scale * query[m]->scale);
    }
}

/// Fewer queries than this do not pay for turning rows round.
constexpr int64_t kMinTurnedQueries = 2;
constexpr int64_t kMaxTurnedDim = 1280;  // whole rows of an encoder, too

inline bool worth_turning(int64_t n_q, int64_t dim) {
    return n_q >= kMinTurnedQueries && dim % 64 == 0 && dim <= kMaxTurnedDim;
}

/// Scores of Q queries for all rows of a block, codes[g][k] four columns (from 4 k on) of each of `lanes`
/// rows.
template <int Q, class Codes>
void turned_scores(Queries q, const Codes (*codes)[kMaxTurnedDim / 4], float scale, Prefetch* next,
                   float* s) {
    constexpr int kGroups = block_rows / 16;
    using Sums = decltype(no_sums(Codes{}));
    const int8_t *high[Q], *low[Q];
    const PackedQuery* query[Q];
    Sums highs[Q][kGroups], lows[Q][kGroups];
#pragma GCC unroll 4
    for (int m = 0; m < Q; ++m) {
        query[m] = reinterpret_cast<const PackedQuery*>(q.from(m).packed);
        high[m] = reinterpret_cast<const int8_t*>(query[m] + 1);
        low[m] = high[m] + packed_digits(q.dim);
#pragma GCC unroll 2
        for (int g = 0; g < kGroups; ++g) {
            highs[m][g] = no_sums(Codes{});
            lows[m][g] = same_sums(Codes{}, query[m]->total);
        }
    }
    for (int64_t k = 0; k < q.dim / 4; ++k) {
        if (next) next->some(4 * block_rows);
#pragma GCC unroll 4
        for (int m = 0; m < Q; ++m) {
            const Codes upper = four_digits(Codes{}, high[m] + 4 * k),
                        lower = four_digits(Codes{}, low[m] + 4 * k);
#pragma GCC unroll 2
            for (int g = 0; g < kGroups; ++g) {
                highs[m][g] = add_products(highs[m][g], codes[g][k], upper);
                lows[m][g] = add_products(lows[m][g], codes[g][k], lower);
            }
        }
    }
#pragma GCC unroll 4
    for (int m = 0; m < Q; ++m) {
#pragma GCC unroll 2
        for (int g = 0; g < kGroups; ++g) {
            store(s + m * block_rows + g * 16,
                  joined(highs[m][g], lows[m][g]) * splat(scale * query[m]->scale));
        }
    }
}

/// s[m][i] = scale * q[m] . rows[i] of many queries.
template <class Rows>
void integer_scores_of(Queries q, int64_t n_q, const Rows& rows, int64_t n, float scale, Prefetch& next,
                       float* s) {
    using Codes = decltype(raised(rows.row(0)));
    Codes codes[block_rows / 16][kMaxTurnedDim / 4];
    for (int64_t first = 0; first < n; first += 16) {
        for (int64_t d = 0; d < q.dim; d += 64) {
            Codes* const to = codes[first / 16] + d / 4;
            for (int64_t i = 0; i < 16; ++i) to[i] = raised(rows.row(first + i < n ? first + i : n - 1) + d);
            transpose(to);
        }
    }
    int64_t m = 0;
    const auto with = [&](auto kernel, int64_t step) {
        kernel(q.from(m), codes, scale, m == 0 ? &next : nullptr, s + m * block_rows);
        m += step;
    };
    while (m + 4 <= n_q) with(turned_scores<4, Codes>, 4);
    while (m + 2 <= n_q) with(turned_scores<2, Codes>, 2);
    if (m < n_q) with(turned_scores<1, Codes>, 1);
}

/// Weights of the rows of a block as unit * (128 high + low), rounded to about 15 bits of the largest.
struct WeightDigits {
    uint8_t high[block_rows], low[block_rows];
    float unit;
};

/// False: they are no numbers to do this with.
inline bool split_weights(const float* p, int64_t n, WeightDigits* digits) {
    constexpr float kMost = 127 * 128, magic = 0x1p23f;  // adding it rounds to whole numbers
    uint32_t bits[block_rows] = {}, most_bits = 0;
    memcpy(bits, p, static_cast<size_t>(n) * sizeof(float));
    for (int i = 0; i < block_rows; ++i) most_bits = bits[i] > most_bits ? bits[i] : most_bits;
    float most, weights[block_rows];
    memcpy(&most, &most_bits, sizeof most);
    memcpy(weights, bits, sizeof weights);
    if (!(most < 0x1p100f)) return false;
    const float shrink = most > 0x1p-100f ? kMost / most : 0;
    digits->unit = most / kMost;
    for (int i = 0; i < block_rows; ++i) {
        const uint32_t code =
            static_cast<uint32_t>(static_cast<int32_t>(weights[i] * shrink + magic - magic));
        digits->high[i] = static_cast<uint8_t>(code >> 7);
        digits->low[i] = static_cast<uint8_t>(code & 127);
    }
    return true;
}

/// 64 columns of Q queries: out = factor * out + weights * rows, the rows turned into quadruples of four
/// rows.
template <int Q, class Rows, class Codes>
void integer_columns(const Product<Rows>& x, int64_t m, int64_t column, const WeightDigits* digits,
                     const Codes (*quads)[4], Prefetch* next) {
    using Sums = decltype(no_sums(Codes{}));
    const int64_t n_quads = (x.n + 3) / 4;
    Sums acc[Q][4];
    const auto add = [&](auto of) {
        for (int64_t t = 0; t < n_quads; ++t) {
            if (next) next->some(4 * 64 / 2);  // of two passes over four rows
            Codes weights[Q];
#pragma GCC unroll 4
            for (int k = 0; k < Q; ++k) weights[k] = four_digits(Codes{}, of(digits[k]) + 4 * t);
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
#pragma GCC unroll 4
                for (int k = 0; k < Q; ++k) acc[k][j] = add_products(acc[k][j], weights[k], quads[t][j]);
            }
        }
    };
#pragma GCC unroll 4
    for (int k = 0; k < Q; ++k) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) acc[k][j] = no_sums(Codes{});
    }
    add([](const WeightDigits& d) { return d.high; });
#pragma GCC unroll 4
    for (int k = 0; k < Q; ++k) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) acc[k][j] = times_128(acc[k][j]);
    }
    add([](const WeightDigits& d) { return d.low; });
#pragma GCC unroll 4
    for (int k = 0; k < Q; ++k) {
        Vec sums[4];
        turned_back(acc[k], sums);
        const float factor = x.factor[(m + k) * x.factor_step];
        float* const out = x.out + (m + k) * x.out_stride + column;
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            const Vec added = sums[j] * splat(digits[k].unit);
            float* const to = out + j * lanes;
            store(to, factor == 0 ? added : fma(splat(factor), load(to), added));
        }
    }
}

/// out = factor * out + weights * rows for a multiple of 64 columns; false, and nothing done, if the weights
/// are not numbers.
template <class Rows>
bool integer_values(const Product<Rows>& x, int64_t dim, Prefetch& next) {
    using Codes = decltype(raised(x.rows.row(0)));
    WeightDigits digits[64];
    for (int64_t m = 0; m < x.n_q; ++m) {
        if (!split_weights(x.p + m * x.ld, x.n, digits + m)) return false;
    }
    for (int64_t column = 0; column < dim; column += 64) {
        Codes quads[block_rows / 4][4];
        for (int64_t i = 0; i < x.n; i += 4) {
            const auto row = [&](int64_t k) { return x.rows.row(i + k < x.n ? i + k : x.n - 1) + column; };
            turn_rows(row(0), row(1), row(2), row(3), quads[i / 4]);
        }
        int64_t m = 0;
        const auto with = [&](auto kernel, int64_t step) {
            kernel(x, m, column, digits + m, quads, m == 0 ? &next : nullptr);
            m += step;
        };
        while (m + 4 <= x.n_q) with(integer_columns<4, Rows, Codes>, 4);
        while (m + 2 <= x.n_q) with(integer_columns<2, Rows, Codes>, 2);
        if (m < x.n_q) with(integer_columns<1, Rows, Codes>, 1);
    }
    return true;
}

}  // namespace
}  // namespace slimrt::cpu::SLIMRT_ISA
