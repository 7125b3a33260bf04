// Scores, online softmax and weighted sums of values for tiles of rows. Compiled once per ISA.
#include "kernels/cpu/attention_tiles.h"
#include "kernels/cpu/stored.h"

namespace slimrt::cpu::SLIMRT_ISA {
namespace {

const float kInfinity = __builtin_inff();

// The block of scores() that fits in L1 beside the queries.
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

/// For many queries: transposes the rows, then multiplies as for values, which needs no horizontal sums.
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
            const Product<RowsOf<float>> x = {
                q + d, q_stride, n_q, &factor, 0, {columns, kScoreRows * sizeof(float)}, n_dims, out + i, ld};
            product<tile / 4>(x, 0, n_rows);
        }
    }
}

/// For few queries: dot products of rows.
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
        while (m + 4 <= n_q) with(4, dots<4, RowsOf<Stored>>);
        while (m + 2 <= n_q) with(2, dots<2, RowsOf<Stored>>);
        if (m < n_q) with(1, dots<1, RowsOf<Stored>>);
    }
}

/// fn(rows) with their element type.
template <class Fn>
void with_rows(uint32_t type, const void* rows, size_t stride, const Fn& fn) {
    with_stored(type, [&]<class Stored>(Stored) {
        if constexpr (Stored::is_float) fn(RowsOf<typename Stored::Code>{rows, stride});
    });
}

}  // namespace

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

void finish_scores(float* s, int64_t n, float cap, const float* bias) {
    const Vec high = splat(cap), inverse = splat(1 / cap);
    const auto finished = [&](Vec x, const auto& bias_at) {
        if (cap > 0) x = high * tanh(x * inverse);
        return bias ? x + bias_at() : x;
    };
    int64_t i = 0;
    for (; i + lanes <= n; i += lanes) store(s + i, finished(load(s + i), [&] { return load(bias + i); }));
    if (i < n)
        store_part(s + i, finished(load_part(s + i, n - i), [&] { return load_part(bias + i, n - i); }),
                   n - i);
}

float softmax(float* s, int64_t n, float* max_so_far, float* sum_so_far) {
    Vec high = splat(-kInfinity);
    const int64_t whole = n / lanes * lanes, left = n - whole;
    for (int64_t i = 0; i < whole; i += lanes) high = max(load(s + i), high);
    float new_max = max_of(high) > *max_so_far ? max_of(high) : *max_so_far;
    for (int64_t i = whole; i < n; ++i) new_max = s[i] > new_max ? s[i] : new_max;

    // If all scores are -inf there is no maximum to subtract; NaN stays NaN either way.
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
        const Product<RowsOf<Stored>> x = {p, ld, n_q, factor, 1, stored, n, out, out_stride};
        n_q == 1 ? product<8>(x, 0, dim) : product<tile / 4>(x, 0, dim);
    });
}

}  // namespace slimrt::cpu::SLIMRT_ISA
