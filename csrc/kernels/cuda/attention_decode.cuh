// What a warp computes of a tile of 32 rows where each sequence has one query: scores, weights, sums of
// values.
#pragma once

#include "kernels/cuda/attention_fetch.cuh"
#include "kernels/cuda/attention_parts.cuh"

namespace slimrt::cuda {

constexpr int kQueries = 8;  // of a block

struct DecodeShape {
    TilePlane k, v;
    int query_groups;  // groups of up to 8 queries of a KV head
    int warp_bytes;    // of a warp's tiles in shared memory
};

__device__ inline float max_of_members(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ inline float sum_of_members(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

/// A block's work.
struct DecodeJob {
    const AttentionView& a;
    const DecodeShape& shape;
    const PlacedSequence& s;
    int64_t row;                // of the query
    int kv_head, value_head;    // V may have fewer heads
    int first_head, n_queries;  // query heads [first_head, first_head + n_queries)
    uint4* queries;             // [step][lane]; with RoPE on read floats, followed by rotations()
    float* units;               // of queries: factors of their scores
    unsigned char* tiles;       // of this warp
    __device__ const ScoreView& scores() const { return a.scores[0]; }
    __device__ const ValueView& values() const { return a.values[0]; }
    __device__ const float* query(int i) const {
        return scores().q.row(row) + int64_t(first_head + i) * scores().q_columns;
    }
    __device__ float* float_queries() const { return reinterpret_cast<float*>(queries); }
    __device__ uint2* rotations() const {
        return reinterpret_cast<uint2*>(float_queries() + kQueries * scores().dim);
    }
    __device__ float finish(int i, float product, float scale, bool sees, int64_t position) const {
        return finish_score(a.finish, product, scale, sees, first_head + i, position - s.position);
    }
};

/// Lays out queries as products read them, each scaled by a power of two to about 1. A warp a query. rotated:
/// K has RoPE on read.
template <bool rotated>
__device__ inline void place_queries(const DecodeJob& job) {
    const int lane = threadIdx.x % 32, dim = job.scores().dim, steps = dim / 16;
    const Reading reading = job.shape.k.reading;
#pragma unroll 1
    for (int i = threadIdx.x / 32; i < kQueries; i += blockDim.x / 32) {
        const bool exists = i < job.n_queries;
        const float* const q = job.query(exists ? i : 0);
        float most = 0;
        for (int column = lane; column < dim && exists; column += 32) most = fmaxf(most, fabsf(q[column]));
        for (int lanes = 16; lanes > 0; lanes /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, lanes));
        const float unit = unit_below(most), shrink = inverse_of_unit(unit);
        if (lane == 0) job.units[i] = unit * job.a.scale;
        if constexpr (rotated) {
            for (int column = lane; column < dim; column += 32)
                job.float_queries()[i * dim + column] = exists ? q[column] * shrink : 0.0f;
        } else {
            for (int at = lane; at < steps * 4; at += 32) {
                const int step = at / 4, member = at % 4;
                uint32_t high[2], low[2];
                for (int second = 0; second < 2; ++second) {
                    const auto number = [&](int i) {
                        return exists ? q[query_column(reading, step, member, second, i)] * shrink : 0.0f;
                    };
                    split_pair(reading == Reading::bf16, number(0), number(1), high[second], low[second]);
                }
                job.queries[step * 32 + i * 4 + member] = make_uint4(high[0], low[0], high[1], low[1]);
            }
        }
    }
    if constexpr (rotated) place_rotations(job.scores().rope_table, reading, dim / 2, job.rotations());
}

/// Softmax state of this lane's query over the warp's rows so far.
struct Sums {
    float max = -infinity(), sum = 0, skipped = 0;
    float unit = 1;  // of values: the power of two below the largest scale so far
    bool any = false;
};

/// Scores of a tile, 8 for this lane's query: rows 8 i + 2 member, + 1.
template <bool rotated>
__device__ inline void score_tile(const DecodeJob& job, int64_t first_position, VisibleRows visible,
                                  float (&out)[4][2]) {
    const TilePlane& k = job.shape.k;
    const CodeTile tile = k.at(job.tiles);
    const int lane = threadIdx.x % 32, query = min(lane / 4, job.n_queries - 1);
    float s[4][4] = {};
    if constexpr (rotated) {
        const int dim = job.scores().dim;
        const float* const first = job.scores().rope_table.row(first_position);
        score(k, tile, TileRotations{job.float_queries(), first, job.rotations(), dim / 2}, s);
    } else {
        score(k, tile, job.queries, job.scores().dim / 16, s);
    }
    const float* const scales = reinterpret_cast<const float*>(tile.scales());
    const float unit = job.units[lane / 4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int row = 8 * i + 2 * (lane % 4) + j;
            const float scale = k.row_scales() ? scales[row] : 1.0f;
            out[i][j] = job.finish(query, (s[i][j] + s[i][j + 2]) * unit, scale, visible.has(row),
                                   first_position + row);
        }
    }
}

/// Online softmax: scores to weights; returns the factor of earlier sums; mass: the weights' sum.
__device__ inline float online_softmax(float (&s)[4][2], Sums& sums, float& mass) {
    float high = sums.max;
#pragma unroll
    for (int i = 0; i < 4; ++i) high = fmaxf(high, fmaxf(s[i][0], s[i][1]));
    high = max_of_members(high);
    const float zero = reference(high), factor = power_of_two(sums.max - zero);
    mass = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            s[i][j] = power_of_two(s[i][j] - zero);
            mass += s[i][j];
        }
    }
    mass = sum_of_members(mass);
    sums.max = high;
    sums.sum = sums.sum * factor + mass;
    sums.skipped *= factor;
    return factor;
}

/// Multiplies weights with the rows' scales, in units of about the largest scale so far; returns the factor
/// of earlier sums.
__device__ inline float scale_weights(const CodeTile& tile, VisibleRows visible, float (&w)[4][2],
                                      Sums& sums) {
    const int lane = threadIdx.x % 32;
    const float* const scales = reinterpret_cast<const float*>(tile.scales());
    float most = visible.has(lane) ? scales[lane] : 0;
    for (int lanes = 16; lanes > 0; lanes /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, lanes));
    const float power = unit_below(most);
    const float unit = most == 0 ? sums.unit : sums.any ? fmaxf(sums.unit, power) : power;
    const float shrink = inverse_of_unit(unit), factor = sums.any ? sums.unit * shrink : 1.0f;
    sums.any = sums.any || most != 0;
    sums.unit = unit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int row = 8 * i + 2 * (lane % 4) + j;
            w[i][j] = visible.has(row) ? w[i][j] * (scales[row] * shrink) : 0.0f;
        }
    }
    return factor;
}

/// sums += weights times the tile's rows, after sums *= factor.
template <int kTiles>
__device__ inline void add_tile(const DecodeJob& job, VisibleRows visible, float factor, float (&w)[4][2],
                                Sums& state, float (&sums)[kTiles][4]) {
    const TilePlane& v = job.shape.v;
    unsigned char* const at = job.tiles + job.shape.k.bytes;
    const CodeTile tile = v.at(at);
    if (few_bits(v.reading) && !visible.all()) clear_scales(v, visible, at);
    if (v.row_scales()) factor *= scale_weights(tile, visible, w, state);
    if (__any_sync(~0u, factor != 1.0f)) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[n][i] *= factor;
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint32_t weights[4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            split_pair(v.reading == Reading::bf16, w[2 * half + i][0], w[2 * half + i][1], weights[2 * i],
                       weights[2 * i + 1]);
        }
        add(v, tile, 16 * half, job.values().dim, weights, sums);
    }
}

}  // namespace slimrt::cuda
