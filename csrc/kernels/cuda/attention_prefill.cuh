// What a warp computes of 16 (query, head) pairs and a tile of rows: scores, weights, sums of values.
#pragma once

#include "kernels/cuda/attention_packed.cuh"

namespace slimrt::cuda {

/// A block's work.
struct PrefillJob {
    const AttentionView& a;
    const PlacedSequence& s;
    int64_t row;  // of the sequence's first query
    int kv_head, sharing;
    int first_pair, n_pairs;
    F16Tile q, k, v;

    __device__ int query(int pair) const { return (first_pair + pair) / sharing; }
    __device__ int head(int pair) const { return kv_head * sharing + (first_pair + pair) % sharing; }
    /// The head of a term's rows that the block's pairs read.
    template <class Term>
    __device__ int head_of(const Term& term) const {
        return kv_head * sharing / (a.n_heads / term.n_heads);
    }
};

template <bool exact>
__device__ inline void load_queries(const PrefillJob& job) {
    const ScoreView& term = job.a.scores[0];
    fill_tile<exact, 4>(job.q, term.dim, [&](int pair, int column, float(&x)[8]) {
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
    int begin, end;  // visible rows, counted from the first of the rows at hand
    float unit;      // of its scores
    float max = -infinity(), sum = 0;
};

__device__ inline int pair_of_lane(int r) { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r; }

/// Two products of a with what load_matrices() loaded; and where numbers are two f16 (exact), of each one
/// with the other's rest.
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
#pragma unroll
    for (int i = 0; i < kRows / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) s[i][j] = 0;
    }
#pragma unroll 2
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

/// Sets which of `rows` a lane's pairs see.
__device__ inline void set_visible_rows(const PrefillJob& job, const Range& rows, PairRow (&own)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int64_t position = job.s.position + own[r].query;
        const Range range = visible_rows(job.a, job.s, rows, position, position);
        own[r].begin = static_cast<int>(range.first - rows.first);
        own[r].end = static_cast<int>(range.end - rows.first);
    }
}

/// Scales the scores of a tile, and masks invisible rows with -inf. first: the tile's first row, counted from
/// the first of the rows at hand; origin: that one's position.
template <int kRows>
__device__ inline void finish_scores(const PrefillJob& job, int64_t origin, int first,
                                     const PairRow (&own)[2], float (&s)[kRows / 8][4]) {
    const ScoreFinish& how = job.a.finish;
    const int member = threadIdx.x % 4, end = first + kRows;
    const bool all = first >= max(own[0].begin, own[1].begin) && end <= min(own[0].end, own[1].end);
    const bool masks = __any_sync(~0u, !all), plain = how.cap <= 0 && !how.relative_bias;
#pragma unroll
    for (int i = 0; i < kRows / 8; ++i) {
        const float units[] = {job.k.unit(8 * i + 2 * member), job.k.unit(8 * i + 2 * member + 1)};
#pragma unroll
        for (int j = 0; j < 4; ++j) s[i][j] *= own[j / 2].unit * units[j % 2];
    }
    if (plain && !masks) return;
    const int heads[] = {job.head(pair_of_lane(0)), job.head(pair_of_lane(1))};
#pragma unroll
    for (int i = 0; i < kRows / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int r = j / 2, at = first + 8 * i + 2 * member + j % 2;
            const bool sees = at >= own[r].begin && at < own[r].end;
            if (plain)
                s[i][j] = sees ? s[i][j] : -infinity();
            else
                s[i][j] = finish_score(how, s[i][j], 1, sees, heads[r],
                                       origin + at - (job.s.position + own[r].query));
        }
    }
}

/// Online softmax: scores to weights; factor: of earlier sums.
template <int kRows>
__device__ inline void online_softmax(PairRow (&own)[2], float (&s)[kRows / 8][4], float (&factor)[2]) {
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
                own[r].sum += s[i][j];  // over this lane's rows
            }
        }
    }
}

/// Multiplies weights with the units of the tile's rows, in the largest unit so far; returns the factor of
/// earlier sums.
template <int kRows>
__device__ inline float scale_weights(const PrefillJob& job, float& unit, float (&w)[kRows / 8][4]) {
    const int lane = threadIdx.x % 32;
    float most = unit;
    for (int row = lane; row < kRows; row += 32) most = fmaxf(most, job.v.unit(row));
    for (int lanes = 16; lanes > 0; lanes /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, lanes));
    const float shrink = inverse_of_unit(most), factor = unit * shrink;
    unit = most;
#pragma unroll
    for (int i = 0; i < kRows / 8; ++i) {
        const float units[] = {job.v.unit(8 * i + 2 * (lane % 4)), job.v.unit(8 * i + 2 * (lane % 4) + 1)};
#pragma unroll
        for (int j = 0; j < 4; ++j) w[i][j] *= units[j % 2] * shrink;
    }
    return factor;
}

/// sums *= factor * of_units for each pair; nothing to do while maxima stay as they are.
template <int kTiles>
__device__ inline void scale_sums(const float (&factor)[2], float of_units, float (&sums)[kTiles][4]) {
    const float by[2] = {factor[0] * of_units, factor[1] * of_units};
    if (!__any_sync(~0u, by[0] != 1 || by[1] != 1)) return;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i][j] *= by[j / 2];
    }
}

/// sums += weights times the tile's rows; all: there are 8 * kTiles columns, so that products need no branch.
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
            load_matrices_transposed(b, at);
            if constexpr (exact) {
                load_matrices_transposed(b_rest, at + job.v.rest());
                multiply_add_rests(sums[n], sums[n + 1], a, a_rest, b, b_rest);
            }
            multiply_add_two(sums[n], sums[n + 1], a, b);
        }
    }
}

}  // namespace slimrt::cuda
