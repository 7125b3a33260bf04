// The inner loops of attention: products of tiles held in registers. For the units compiled once per ISA.
#pragma once

#include "kernels/cpu/access.h"
#include "kernels/cpu/rows.h"
#include "kernels/cpu/simd.h"

namespace slimrt::cpu::SLIMRT_ISA {
namespace {

/// Accumulators of a register tile; the other half of the registers holds operands.
constexpr int tile = registers / 2;

/// Rows `stride` bytes apart.
template <class Stored>
struct RowsOf {
    static constexpr bool packed = false, is_int8 = __is_same(Stored, Int8);
    const void* data;
    size_t stride;

    const Stored* row(int64_t i) const {
        return reinterpret_cast<const Stored*>(static_cast<const char*>(data) + i * stride);
    }
    RowsOf at(int64_t i, int64_t column) const { return {row(i) + column, stride}; }
};

/// Rows of `width` elements without gaps: the stride is known to the compiler.
template <class Stored, int width>
struct PackedRows {
    static constexpr bool packed = true, is_int8 = __is_same(Stored, Int8);
    static constexpr size_t stride = width * sizeof(Stored);
    const Stored* data;

    const Stored* row(int64_t i) const { return data + i * width; }
    PackedRows at(int64_t i, int64_t column) const { return {row(i) + column}; }
};

template <class Stored>
inline RowsOf<Stored> rows_from(const Stored* row, size_t stride) {
    return {row, stride};
}

/// Whether products of Q queries prefetch in steps; portable code is small instead. Of several queries only
/// with vectors of 16 floats: elsewhere the arithmetic takes longer than memory.
template <int Q>
constexpr bool prefetches_in_steps = lanes * registers > 64 && (Q == 1 || lanes == 16);

/// Rows that Q queries are multiplied with side by side. Hardware prefetchers follow few streams at once, but
/// fewer accumulators would not hide the latency of fma (with less than 512 bits CPUs start two in a cycle).
template <int Q>
constexpr int kStreams = Q > 1         ? tile / Q
                         : lanes == 16 ? 4
                                       : 8;

/// acc[m * R + i] = query m times row i, lane by lane (no horizontal sum yet).
template <int Q, int R, class Row>
[[gnu::always_inline]] inline void dots_side_by_side(const float* q, size_t q_stride, const Row (&row)[R],
                                                     int64_t dim, PrefetchSteps& ahead, Vec (&acc)[Q * R]) {
#pragma GCC unroll 16
    for (int i = 0; i < Q * R; ++i) acc[i] = splat(0);
    const auto step = [&](int64_t d, auto read) {
        Vec x[Q];
#pragma GCC unroll 4
        for (int m = 0; m < Q; ++m) x[m] = read(q + m * q_stride + d);
#pragma GCC unroll 16
        for (int i = 0; i < R; ++i) {
            const Vec y = read(row[i] + d);
#pragma GCC unroll 4
            for (int m = 0; m < Q; ++m) acc[m * R + i] = fma(x[m], y, acc[m * R + i]);
        }
    };
    // The remainder comes first, while the sums need not be in registers: load_part may call memcpy.
    const int64_t whole = dim / lanes * lanes;
    if (whole < dim) step(whole, [left = dim - whole](auto p) { return load_part(p, left); });
    for (int64_t d = 0; d < whole; d += lanes) {
        if constexpr (prefetches_in_steps<Q>) ahead.step();
        step(d, [](auto p) { return load(p); });
    }
}

/// out[m * ld + i] (+)= scale * q[m] . row i, of Q queries and up to R rows. Rows past the last repeat it and
/// are not written (PackedRows always have R). ahead: a step for each vector of kStreams rows.
template <int Q, class Rows>
[[gnu::noinline]] void dots_tile(const float* q, size_t q_stride, Rows rows, int64_t n, int64_t dim,
                                 float scale, bool accumulate, float* out, size_t ld,
                                 PrefetchSteps ahead = {}) {
    constexpr int R = tile / Q, streams = kStreams<Q>;
    Vec acc[tile];
#pragma GCC unroll 1
    for (int first = 0; first < R; first += streams) {
        decltype(rows.row(0)) row[streams];
#pragma GCC unroll 16
        for (int i = 0; i < streams; ++i)
            row[i] = rows.row(Rows::packed || first + i < n ? first + i : n - 1);
        Vec some[Q * streams];
        dots_side_by_side<Q, streams>(q, q_stride, row, dim, ahead, some);
#pragma GCC unroll 16
        for (int i = 0; i < Q * streams; ++i) acc[first + i] = some[i];
    }

    float dots[tile];
#pragma GCC unroll 4
    for (int i = 0; i < tile; i += lanes) store(dots + i, sums(acc + i) * splat(scale));
    for (int m = 0; m < Q; ++m) {
        float* to = out + m * ld;
        const float* from = dots + m * R;
        if (n >= R && !accumulate) {
            memcpy(to, from, R * sizeof(float));
        } else {
            for (int i = 0; i < (n < R ? n : R); ++i) to[i] = from[i] + (accumulate ? to[i] : 0);
        }
    }
}

template <int Q, class Rows>
inline void dots(const float* q, size_t q_stride, Rows rows, int64_t n, int64_t dim, float scale,
                 bool accumulate, float* out, size_t ld) {
    constexpr int R = tile / Q;
    for (int64_t i = 0; i < n; i += R) {
        dots_tile<Q>(q, q_stride, rows.at(i, 0), n - i, dim, scale, accumulate, out + i, ld);
    }
}

/// Loads V vectors of a row; for codes of few bits see few_bits.h.
template <int V, class At>
inline void load_row(At from, Vec (&to)[V]) {
#pragma GCC unroll 16
    for (int j = 0; j < V; ++j) to[j] = load(from + j * lanes);
}

/// out[m] = factor[m * factor_step] * out[m] + sum_i p[m * ld + i] * rows[i]
template <class Rows>
struct Product {
    const float* p;
    size_t ld;
    int64_t n_q;
    const float* factor;
    int64_t factor_step;
    Rows rows;
    int64_t n;
    float* out;
    size_t out_stride;
    PrefetchSteps ahead = {};  // a step for each row, if rows are at least kStepVectors
};

constexpr int kStepVectors = 4;  // of a row at a time: from so many on with steps of prefetching

/// Q queries from m on times V vectors of columns; if Part, one vector with `left` elements.
template <int Q, int V, bool Part, class Rows>
inline void product_tile(const Product<Rows>& x, int64_t m, int64_t column, int64_t left) {
    const auto read = [left](auto p) { return Part ? load_part(p, left) : load(p); };
    const float* const p = x.p + m * x.ld;
    float* const out = x.out + m * x.out_stride + column;
    Vec acc[Q][V];
#pragma GCC unroll 4
    for (int k = 0; k < Q; ++k) {
        const float factor = x.factor[(m + k) * x.factor_step];
#pragma GCC unroll 16
        for (int j = 0; j < V; ++j) {
            acc[k][j] = factor == 0 ? splat(0) : splat(factor) * read(out + k * x.out_stride + j * lanes);
        }
    }
    PrefetchSteps ahead = column == 0 && m == 0 ? x.ahead : PrefetchSteps();
    for (int64_t i = 0; i < x.n; ++i) {
        if constexpr (prefetches_in_steps<Q> && V >= kStepVectors) ahead.step();
        const auto from = x.rows.row(i) + column;
        Vec row[V];
        if constexpr (loads_groups && !Part) {
            load_row(from, row);
        } else {
#pragma GCC unroll 16
            for (int j = 0; j < V; ++j) row[j] = read(from + j * lanes);
        }
#pragma GCC unroll 4
        for (int k = 0; k < Q; ++k) {
            const Vec weight = splat(p[k * x.ld + i]);
#pragma GCC unroll 16
            for (int j = 0; j < V; ++j) acc[k][j] = fma(weight, row[j], acc[k][j]);
        }
    }
#pragma GCC unroll 4
    for (int k = 0; k < Q; ++k) {
#pragma GCC unroll 16
        for (int j = 0; j < V; ++j) {
            float* to = out + k * x.out_stride + j * lanes;
            Part ? store_part(to, acc[k][j], left) : store(to, acc[k][j]);
        }
    }
}

template <int V, bool Part, class Rows>
void product_queries(const Product<Rows>& x, int64_t column, int64_t left) {
    int64_t m = 0;
    if constexpr (4 * V <= tile) {
        for (; m + 4 <= x.n_q; m += 4) product_tile<4, V, Part>(x, m, column, left);
        for (; m + 2 <= x.n_q; m += 2) product_tile<2, V, Part>(x, m, column, left);
    }
    for (; m < x.n_q; ++m) product_tile<1, V, Part>(x, m, column, left);
}

/// Columns [column, dim): as many vectors at a time as fit in registers, for all queries while those columns
/// of the rows are in L1; then half as many, down to the remainder.
template <int V, class Rows>
void product(const Product<Rows>& x, int64_t column, int64_t dim) {
    for (; column + V * lanes <= dim; column += V * lanes) product_queries<V, false>(x, column, 0);
    if (column == dim) return;
    if constexpr (V > 1) {
        product<V / 2>(x, column, dim);
    } else {
        product_queries<1, true>(x, column, dim - column);
    }
}

}  // namespace
}  // namespace slimrt::cpu::SLIMRT_ISA
