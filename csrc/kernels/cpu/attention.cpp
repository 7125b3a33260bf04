// The inner loops of attention: products of tiles, held in registers. Compiled once per ISA.
#include "kernels/cpu/rows.h"
#include "kernels/cpu/simd.h"

namespace slimrt::cpu::SLIMRT_ISA {
namespace {

/// Accumulators of a register tile; the other half of the registers holds operands.
constexpr int tile = registers / 2;

const float kInfinity = __builtin_inff();

/// Rows `stride` bytes apart.
template <class Stored>
struct RowsOf {
    const void* data;
    size_t stride;

    const Stored* row(int64_t i) const {
        return reinterpret_cast<const Stored*>(static_cast<const char*>(data) + i * stride);
    }
    RowsOf at(int64_t i, int64_t column) const { return {row(i) + column, stride}; }
};

/// Q queries times R rows, by dot products. Rows beyond the last one repeat it and are not written.
template <int Q, class Stored>
void dots_tile(const float* q, size_t q_stride, RowsOf<Stored> rows, int64_t n, int64_t dim, float scale,
               bool accumulate, float* out, size_t ld) {
    constexpr int R = tile / Q;
    const Stored* row[R];
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) row[i] = rows.row(i < n ? i : n - 1);
    Vec acc[tile];
#pragma GCC unroll 16
    for (int i = 0; i < tile; ++i) acc[i] = splat(0);
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
    // The part of a vector comes first, while the sums need not be in registers: it may call memcpy.
    const int64_t whole = dim / lanes * lanes;
    if (whole < dim) step(whole, [left = dim - whole](auto p) { return load_part(p, left); });
    for (int64_t d = 0; d < whole; d += lanes) step(d, [](auto p) { return load(p); });

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

template <int Q, class Stored>
void dots(const float* q, size_t q_stride, RowsOf<Stored> rows, int64_t n, int64_t dim, float scale,
          bool accumulate, float* out, size_t ld) {
    constexpr int R = tile / Q;
    for (int64_t i = 0; i < n; i += R) {
        dots_tile<Q>(q, q_stride, rows.at(i, 0), n - i, dim, scale, accumulate, out + i, ld);
    }
}

/// out[m] = factor[m * factor_step] * out[m] + sum_i p[m * ld + i] * rows[i]
template <class Stored>
struct Product {
    const float* p;
    size_t ld;
    int64_t n_q;
    const float* factor;
    int64_t factor_step;
    RowsOf<Stored> rows;
    int64_t n;
    float* out;
    size_t out_stride;
};

/// Q queries from m on, V vectors of columns, of which there is one with `left` elements when Part.
template <int Q, int V, bool Part, class Stored>
void product_tile(const Product<Stored>& x, int64_t m, int64_t column, int64_t left) {
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
    for (int64_t i = 0; i < x.n; ++i) {
        const Stored* from = x.rows.row(i) + column;
        Vec row[V];
#pragma GCC unroll 16
        for (int j = 0; j < V; ++j) row[j] = read(from + j * lanes);
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

template <int V, bool Part, class Stored>
void product_queries(const Product<Stored>& x, int64_t column, int64_t left) {
    int64_t m = 0;
    if constexpr (4 * V <= tile) {
        for (; m + 4 <= x.n_q; m += 4) product_tile<4, V, Part>(x, m, column, left);
        for (; m + 2 <= x.n_q; m += 2) product_tile<2, V, Part>(x, m, column, left);
    }
    for (; m < x.n_q; ++m) product_tile<1, V, Part>(x, m, column, left);
}

/// Columns [column, dim): as many vectors at once as fit, for all queries while those columns of the rows are
/// in the first-level cache; then half as many, down to a part of one.
template <int V, class Stored>
void product(const Product<Stored>& x, int64_t column, int64_t dim) {
    for (; column + V * lanes <= dim; column += V * lanes) product_queries<V, false>(x, column, 0);
    if (column == dim) return;
    if constexpr (V > 1) {
        product<V / 2>(x, column, dim);
    } else {
        product_queries<1, true>(x, column, dim - column);
    }
}

// What scores() works on at once: it fits the first-level cache beside the queries.
constexpr int64_t kScoreRows = 64, kScoreDims = 128, kDotDims = 256;
constexpr int64_t kMinTransposedQueries = 16, kMinTransposedRows = 32;

/// to[d][i] = scale * rows[i][d]
template <class Stored>
void transpose_scaled(RowsOf<Stored> rows, int64_t n, int64_t dim, float scale, float* to) {
    for (int64_t i = 0; i < n; i += lanes) {
        for (int64_t d = 0; d < dim; d += lanes) {
            const int64_t left = dim - d;
            Vec square[lanes];
            for (int k = 0; k < lanes; ++k) {
                const Stored* from = rows.row(i + k < n ? i + k : n - 1) + d;
                square[k] = (left < lanes ? load_part(from, left) : load(from)) * splat(scale);
            }
            transpose(square);
            for (int k = 0; k < lanes && k < left; ++k) store(to + (d + k) * kScoreRows + i, square[k]);
        }
    }
}

/// For many queries: the rows transposed, then the same product as for values, which needs no sums across
/// vectors.
template <class Stored>
void scores_transposed(const float* q, size_t q_stride, int64_t n_q, RowsOf<Stored> rows, int64_t n,
                       int64_t dim, float scale, bool accumulate, float* out, size_t ld) {
    float columns[kScoreDims * kScoreRows];
    for (int64_t i = 0; i < n; i += kScoreRows) {
        const int64_t n_rows = n - i < kScoreRows ? n - i : kScoreRows;
        for (int64_t d = 0; d < dim; d += kScoreDims) {
            const int64_t n_dims = dim - d < kScoreDims ? dim - d : kScoreDims;
            transpose_scaled(rows.at(i, d), n_rows, n_dims, scale, columns);
            const float factor = accumulate || d > 0;
            const Product<float> x = {
                q + d, q_stride, n_q, &factor, 0, {columns, kScoreRows * sizeof(float)}, n_dims, out + i, ld};
            product<tile / 4>(x, 0, n_rows);
        }
    }
}

/// For few queries.
template <class Stored>
void scores_by_dots(const float* q, size_t q_stride, int64_t n_q, RowsOf<Stored> rows, int64_t n, int64_t dim,
                    float scale, bool accumulate, float* out, size_t ld) {
    for (int64_t d = 0; d < dim; d += kDotDims) {
        const int64_t n_dims = dim - d < kDotDims ? dim - d : kDotDims;
        int64_t m = 0;
        const auto with = [&](int64_t step, auto kernel) {
            kernel(q + m * q_stride + d, q_stride, rows.at(0, d), n, n_dims, scale, accumulate || d > 0,
                   out + m * ld, ld);
            m += step;
        };
        while (m + 4 <= n_q) with(4, dots<4, Stored>);
        while (m + 2 <= n_q) with(2, dots<2, Stored>);
        if (m < n_q) with(1, dots<1, Stored>);
    }
}

/// Calls fn with the rows as what they are. Numbers: core/dtype.h.
template <class Fn>
void with_rows(uint32_t type, const void* rows, size_t stride, const Fn& fn) {
    switch (type) {
        case 0:
            return fn(RowsOf<float>{rows, stride});
        case 1:
            return fn(RowsOf<Half>{rows, stride});
        default:
            return fn(RowsOf<Brain>{rows, stride});
    }
}

}  // namespace

void widen(uint32_t type, const void* from, size_t from_stride, int64_t n_rows, int64_t n, float* to,
           size_t to_stride) {
    with_rows(type, from, from_stride, [&](auto rows) {
        for (int64_t r = 0; r < n_rows; ++r) {
            const auto* row = rows.row(r);
            float* out = to + r * to_stride;
            int64_t i = 0;
            for (; i + lanes <= n; i += lanes) store(out + i, load(row + i));
            if (i < n) store_part(out + i, load_part(row + i, n - i), n - i);
        }
    });
}

void scores(const float* q, size_t q_stride, int64_t n_q, uint32_t type, const void* rows, size_t stride,
            int64_t n, int64_t dim, float scale, bool accumulate, float* out, size_t ld) {
    with_rows(type, rows, stride, [&](auto stored) {
        if (n_q >= kMinTransposedQueries && n >= kMinTransposedRows) {
            scores_transposed(q, q_stride, n_q, stored, n, dim, scale, accumulate, out, ld);
        } else {
            scores_by_dots(q, q_stride, n_q, stored, n, dim, scale, accumulate, out, ld);
        }
    });
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

void values(const float* p, size_t ld, int64_t n_q, const float* factor, uint32_t type, const void* rows,
            size_t stride, int64_t n, int64_t dim, float* out, size_t out_stride) {
    with_rows(type, rows, stride, [&]<class Stored>(RowsOf<Stored> stored) {
        const Product<Stored> x = {p, ld, n_q, factor, 1, stored, n, out, out_stride};
        n_q == 1 ? product<8>(x, 0, dim) : product<tile / 4>(x, 0, dim);
    });
}

}  // namespace slimrt::cpu::SLIMRT_ISA
