// What a warp does with 16 (query, head) pairs and a tile of rows: scores, weights, sums of values.
#pragma once

#include "kernels/cuda/attention_tile.cuh"

namespace slimrt::cuda {

/// What a block works on.
struct PrefillJob {
    const AttentionView& a;
    const PlacedSequence& s;
    int64_t row;  // of the sequence's first query
    int kv_head, sharing;
    int first_pair, n_pairs;
    Tile q, k, v;

    __device__ int query(int pair) const { return (first_pair + pair) / sharing; }
    __device__ int head(int pair) const { return kv_head * sharing + (first_pair + pair) % sharing; }
    /// Which head of a term's rows serves all of them.
    template <class Term>
    __device__ int head_of(const Term& term) const {
        return kv_head * sharing / (a.n_heads / term.n_heads);
    }
};

/// A plane's head: where stored heads are not those of the term, a row has one.
template <class Term>
__device__ inline HeadSource source_of(const PrefillJob& job, const Term& term, bool fresh) {
    HeadSource from{};
    from.rows = fresh ? fresh_view(term.fresh, job.row, job.s.position) : term.stored;
    from.table = job.s.table;
    from.dim = term.dim;
    const bool side_by_side = from.rows.head_dim != term.dim || !from.rows.paged;
    from.head = side_by_side ? 0 : job.head_of(term);
    from.first = side_by_side ? job.head_of(term) * term.dim : 0;
    return from;
}
__device__ inline HeadSource keys_of(const PrefillJob& job, bool fresh) {
    const ScoreView& term = job.a.scores[0];
    HeadSource from = source_of(job, term, fresh);
    const int column = job.kv_head * term.dim;
    from.row_scale = term.row_scale ? term.row_scale + column : nullptr;
    from.bias = term.bias ? term.bias + column : nullptr;
    if (term.fresh_factors.data) {
        from.factors = fresh ? fresh_view(term.fresh_factors, job.row, job.s.position) : term.factors;
        if (fresh) from.factors.dense_head = sizeof(float);
        from.factor_head = term.head_factors ? job.kv_head : 0;
    }
    from.turns = term.turns;
    from.n_rot = term.n_rot;
    from.interleaved = term.interleaved;
    return from;
}

template <bool exact>
__device__ inline void load_queries(const PrefillJob& job) {
    const ScoreView& term = job.a.scores[0];
    fill_tile<exact>(job.q, term.dim, [&](int pair, int column, float(&x)[8]) {
        if (pair >= job.n_pairs) return;
        const float* const from =
            term.q.row(job.row + job.query(pair)) + int64_t(job.head(pair)) * term.q_columns + column;
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = from[i];
    });
}

/// One of the two pairs of a lane: rows lane / 4 and lane / 4 + 8 of its warp's 16.
struct PairRow {
    int query;
    float unit;  // of its scores
    float max = -infinity(), sum = 0;
};

__device__ inline int pair_of_lane(int r) { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r; }

/// Two products of a with what load_matrices() gave; and where numbers are two f16, of each with the other's
/// rest.
__device__ inline void multiply_add_two(float (&first)[4], float (&second)[4], const uint32_t (&a)[4],
                                        const uint32_t (&b)[4]) {
    multiply_add_f16(first, a, b[0], b[1]);
    multiply_add_f16(second, a, b[2], b[3]);
}
__device__ inline void multiply_add_rests(float (&first)[4], float (&second)[4], const uint32_t (&a)[4],
                                          const uint32_t (&a_rest)[4], const uint32_t (&b)[4],
                                          const uint32_t (&b_rest)[4]) {
    multiply_add_two(first, second, a, b_rest);
    multiply_add_two(first, second, a_rest, b);
}

/// Scores of this warp's 16 pairs and a tile's rows.
template <bool exact, int kRows>
__device__ inline void score_tile(const PrefillJob& job, float (&s)[kRows / 8][4]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const unsigned char* const q = job.q.at(warp * 16 + lane % 16, lane / 16 * 8);
    const unsigned char* const k = job.k.at(lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8);
    const int steps = padded(job.a.scores[0].dim) / 16;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        uint32_t a[4], a_rest[4], b[4], b_rest[4];
        load_matrices(a, q + step * 32);
        if constexpr (exact) load_matrices(a_rest, q + job.q.rest() + step * 32);
#pragma unroll
        for (int i = 0; i < kRows / 8; i += 2) {
            const unsigned char* const at = k + i * 8 * job.k.stride + step * 32;
            load_matrices(b, at);
            if constexpr (exact) {
                load_matrices(b_rest, at + job.k.rest());
                multiply_add_rests(s[i], s[i + 1], a, a_rest, b, b_rest);
            }
            multiply_add_two(s[i], s[i + 1], a, b);
        }
    }
}

/// Scores of tile rows at positions from `first` on, in units of what they are, and unseen ones: -inf.
template <int kRows>
__device__ inline void finish_scores(const PrefillJob& job, const Range& rows, int64_t first,
                                     const PairRow (&own)[2], float (&s)[kRows / 8][4]) {
    const int member = threadIdx.x % 4;
    int begin[2], end[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int64_t position = job.s.position + own[r].query;
        const Range range = seen(job.a, job.s, rows, position, position);
        begin[r] = static_cast<int>(min(max(range.first - first, int64_t(0)), int64_t(kRows)));
        end[r] = static_cast<int>(max(min(range.end - first, int64_t(kRows)), int64_t(0)));
    }
    const bool all = begin[0] == 0 && begin[1] == 0 && end[0] == kRows && end[1] == kRows;
    const bool masks = __any_sync(~0u, !all);
#pragma unroll
    for (int i = 0; i < kRows / 8; ++i) {
        const float2 units = *reinterpret_cast<const float2*>(job.k.units + 8 * i + 2 * member);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int r = j / 2, at = 8 * i + 2 * member + j % 2;
            const bool sees = !masks || (at >= begin[r] && at < end[r]);
            s[i][j] = finish_score(job.a.finish, s[i][j], own[r].unit * (j % 2 ? units.y : units.x), sees,
                                   job.head(pair_of_lane(r)), first + at - (job.s.position + own[r].query));
        }
    }
}

/// Scores to weights; factor: what earlier sums are multiplied with.
template <int kRows>
__device__ inline void weigh(PairRow (&own)[2], float (&s)[kRows / 8][4], float (&factor)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float high = own[r].max;
#pragma unroll
        for (int i = 0; i < kRows / 8; ++i) high = fmaxf(high, fmaxf(s[i][2 * r], s[i][2 * r + 1]));
        high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
        high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
        const float zero = reference(high);
        factor[r] = power_of_two(own[r].max - zero);
        own[r].max = high;
        own[r].sum *= factor[r];
#pragma unroll
        for (int i = 0; i < kRows / 8; ++i) {
#pragma unroll
            for (int j = 2 * r; j < 2 * r + 2; ++j) {
                s[i][j] = power_of_two(s[i][j] - zero);
                own[r].sum += s[i][j];  // of this lane's rows
            }
        }
    }
}

/// Weights times the units of the tile's rows, in the largest so far; returns the factor of earlier sums.
template <int kRows>
__device__ inline float scale_weights(const PrefillJob& job, float& unit, float (&w)[kRows / 8][4]) {
    const int lane = threadIdx.x % 32;
    float most = unit;
    for (int row = lane; row < kRows; row += 32) most = fmaxf(most, job.v.units[row]);
    for (int lanes = 16; lanes > 0; lanes /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, lanes));
    const float shrink = inverse_of_unit(most), factor = unit * shrink;
    unit = most;
#pragma unroll
    for (int i = 0; i < kRows / 8; ++i) {
        const float2 units = *reinterpret_cast<const float2*>(job.v.units + 8 * i + 2 * (lane % 4));
#pragma unroll
        for (int j = 0; j < 4; ++j) w[i][j] *= (j % 2 ? units.y : units.x) * shrink;
    }
    return factor;
}

/// sums += weights times the tile's rows; all: of 8 * kTiles columns, without a branch between products.
template <bool exact, bool all, int kRows, int kTiles>
__device__ inline void add_values(const PrefillJob& job, const float (&w)[kRows / 8][4],
                                  float (&sums)[kTiles][4]) {
    const int lane = threadIdx.x % 32, columns = job.a.values[0].dim;
    const unsigned char* const v = job.v.at(lane % 16, lane / 16 * 8);
#pragma unroll
    for (int i = 0; i < kRows / 8; i += 2) {
        uint32_t a[4], a_rest[4], b[4], b_rest[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const float x = w[i + k / 2][k % 2 * 2], y = w[i + k / 2][k % 2 * 2 + 1];
            a[k] = pair_f16(x, y);
            if constexpr (exact) a_rest[k] = rest_of_pair(x, y, a[k]);
        }
#pragma unroll
        for (int n = 0; n < kTiles; n += 2) {
            if (!all && 8 * n >= columns) break;
            const unsigned char* const at = v + i * 8 * job.v.stride + n * 16;
            load_matrices_turned(b, at);
            if constexpr (exact) {
                load_matrices_turned(b_rest, at + job.v.rest());
                multiply_add_rests(sums[n], sums[n + 1], a, a_rest, b, b_rest);
            }
            multiply_add_two(sums[n], sums[n + 1], a, b);
        }
    }
}

}  // namespace slimrt::cuda
