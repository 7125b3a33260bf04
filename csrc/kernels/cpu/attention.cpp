// The inner loops of attention: products of tiles, held in registers. Compiled once per ISA.
#include "kernels/cpu/rows.h"
#include "kernels/cpu/simd.h"

namespace slimrt::cpu::SLIMRT_ISA {
namespace {

/// Accumulators of a register tile; the other half of the registers holds operands.
constexpr int tile = registers / 2;

const float kInfinity = __builtin_inff();

template <class Stored>
void widen_rows(const void* from, size_t from_stride, int64_t n_rows, int64_t n, float* to,
                size_t to_stride) {
    for (int64_t r = 0; r < n_rows; ++r, to += to_stride) {
        const Stored* row = reinterpret_cast<const Stored*>(static_cast<const char*>(from) + r * from_stride);
        int64_t i = 0;
        for (; i + lanes <= n; i += lanes) store(to + i, load(row + i));
        if (i < n) store_part(to + i, load_part(row + i, n - i), n - i);
    }
}

/// Q queries times R rows. Rows beyond the last one repeat it and are not written.
template <int Q>
void scores_tile(const float* q, size_t q_stride, const float* rows, size_t stride, int64_t n, int64_t dim,
                 float scale, bool accumulate, float* out, size_t ld) {
    constexpr int R = tile / Q;
    const float* row[R];
    for (int i = 0; i < R; ++i) row[i] = rows + (i < n ? i : n - 1) * stride;
    Vec acc[tile];
    for (Vec& a : acc) a = splat(0);
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
    int64_t d = 0;
    for (; d + lanes <= dim; d += lanes) step(d, [](const float* p) { return load(p); });
    if (d < dim) step(d, [left = dim - d](const float* p) { return load_part(p, left); });

    float dots[tile];
#pragma GCC unroll 4
    for (int i = 0; i < tile; i += lanes) store(dots + i, sums(acc + i) * splat(scale));
    for (int m = 0; m < Q; ++m) {
        for (int i = 0; i < (n < R ? n : R); ++i) {
            float& s = out[m * ld + i];
            s = accumulate ? s + dots[m * R + i] : dots[m * R + i];
        }
    }
}

template <int Q>
void scores_of(const float* q, size_t q_stride, const float* rows, size_t stride, int64_t n, int64_t dim,
               float scale, bool accumulate, float* out, size_t ld) {
    constexpr int R = tile / Q;
    for (int64_t i = 0; i < n; i += R) {
        scores_tile<Q>(q, q_stride, rows + i * stride, stride, n - i, dim, scale, accumulate, out + i, ld);
    }
}

/// Q queries, V vectors of columns, of which the last has `left` elements when Part.
template <int Q, int V, bool Part>
void values_tile(const float* p, size_t ld, const float* factor, const float* rows, size_t stride, int64_t n,
                 int64_t left, float* out, size_t out_stride) {
    const auto read = [left](const float* x) { return Part ? load_part(x, left) : load(x); };
    Vec acc[Q][V];
#pragma GCC unroll 4
    for (int m = 0; m < Q; ++m) {
#pragma GCC unroll 16
        for (int j = 0; j < V; ++j) {
            const float* before = out + m * out_stride + j * lanes;
            acc[m][j] = factor[m] == 0 ? splat(0) : splat(factor[m]) * read(before);
        }
    }
    for (int64_t i = 0; i < n; ++i) {
        Vec row[V];
#pragma GCC unroll 16
        for (int j = 0; j < V; ++j) row[j] = read(rows + i * stride + j * lanes);
#pragma GCC unroll 4
        for (int m = 0; m < Q; ++m) {
            const Vec weight = splat(p[m * ld + i]);
#pragma GCC unroll 16
            for (int j = 0; j < V; ++j) acc[m][j] = fma(weight, row[j], acc[m][j]);
        }
    }
#pragma GCC unroll 4
    for (int m = 0; m < Q; ++m) {
#pragma GCC unroll 16
        for (int j = 0; j < V; ++j) {
            float* to = out + m * out_stride + j * lanes;
            Part ? store_part(to, acc[m][j], left) : store(to, acc[m][j]);
        }
    }
}

/// The columns of Q queries: as many vectors at once as fit, then half as many, down to a part of one.
template <int Q, int V>
void values_columns(const float* p, size_t ld, const float* factor, const float* rows, size_t stride,
                    int64_t n, int64_t dim, float* out, size_t out_stride) {
    int64_t c = 0;
    for (; c + V * lanes <= dim; c += V * lanes) {
        values_tile<Q, V, false>(p, ld, factor, rows + c, stride, n, 0, out + c, out_stride);
    }
    if (c == dim) return;
    if constexpr (V > 1) {
        values_columns<Q, V / 2>(p, ld, factor, rows + c, stride, n, dim - c, out + c, out_stride);
    } else {
        values_tile<Q, 1, true>(p, ld, factor, rows + c, stride, n, dim - c, out + c, out_stride);
    }
}

}  // namespace

void widen(uint32_t type, const void* from, size_t from_stride, int64_t n_rows, int64_t n, float* to,
           size_t to_stride) {
    switch (type) {  // numbers: core/dtype.h
        case 0:
            return widen_rows<float>(from, from_stride, n_rows, n, to, to_stride);
        case 1:
            return widen_rows<Half>(from, from_stride, n_rows, n, to, to_stride);
        default:
            return widen_rows<Brain>(from, from_stride, n_rows, n, to, to_stride);
    }
}

void scores(const float* q, size_t q_stride, int64_t n_q, const float* rows, size_t stride, int64_t n,
            int64_t dim, float scale, bool accumulate, float* out, size_t ld) {
    int64_t m = 0;
    for (; m + 4 <= n_q; m += 4) {
        scores_of<4>(q + m * q_stride, q_stride, rows, stride, n, dim, scale, accumulate, out + m * ld, ld);
    }
    for (; m + 2 <= n_q; m += 2) {
        scores_of<2>(q + m * q_stride, q_stride, rows, stride, n, dim, scale, accumulate, out + m * ld, ld);
    }
    if (m < n_q) {
        scores_of<1>(q + m * q_stride, q_stride, rows, stride, n, dim, scale, accumulate, out + m * ld, ld);
    }
}

float softmax(float* s, int64_t n, float* max_so_far, float* sum_so_far) {
    Vec high = splat(-kInfinity);
    const int64_t whole = n / lanes * lanes, left = n - whole;
    for (int64_t i = 0; i < whole; i += lanes) high = max(load(s + i), high);
    float new_max = max_of(high) > *max_so_far ? max_of(high) : *max_so_far;
    for (int64_t i = whole; i < n; ++i) new_max = s[i] > new_max ? s[i] : new_max;

    // Rows that are all -inf have no maximum to subtract; NaN stays NaN either way.
    const Vec reference = splat(new_max == -kInfinity ? 0 : new_max);
    Vec added = splat(0);
    for (int64_t i = 0; i < whole; i += lanes) {
        const Vec p = exp(load(s + i) - reference);
        store(s + i, p);
        added = added + p;
    }
    float total = sum(added);
    if (left) {
        store_part(s + whole, exp(load_part(s + whole, left) - reference), left);
        for (int64_t i = whole; i < n; ++i) total += s[i];
    }
    float first[lanes];
    store(first, exp(splat(*max_so_far) - reference));
    *max_so_far = new_max;
    *sum_so_far = *sum_so_far * first[0] + total;
    return first[0];
}

void values(const float* p, size_t ld, int64_t n_q, const float* factor, const float* rows, size_t stride,
            int64_t n, int64_t dim, float* out, size_t out_stride) {
    int64_t m = 0;
    const auto at = [&](int64_t step, auto columns) {
        columns(p + m * ld, ld, factor + m, rows, stride, n, dim, out + m * out_stride, out_stride);
        m += step;
    };
    while (m + 4 <= n_q) at(4, values_columns<4, tile / 4>);
    while (m + 2 <= n_q) at(2, values_columns<2, tile / 4>);
    if (m < n_q) at(1, values_columns<1, 8>);
}

}  // namespace slimrt::cpu::SLIMRT_ISA
