// Products with F32 weights in float32 throughout. Few tokens: a warp a row of the weight, eight loads in
// flight. Many: tiles of 64 tokens by 64 rows, 4 by 4 of them a thread, in steps of 16 of k through shared
// memory, the next step in flight in registers.
#include <algorithm>

#include "kernels/cuda/linear_job.cuh"

namespace slimrt::cuda {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;

__device__ const float* floats_of(const Job& job, const Tile& tile, int row) {
    return reinterpret_cast<const float*>(weight_row(job, tile, row));
}

__global__ void few_float_kernel(Job job) {
    constexpr int kAtOnce = 8;
    const Tile tile = tile_at(job, blockIdx.x, kWarps);
    const int row = tile.row + threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    if (row >= job.parts[tile.part].rows) return;
    const float* const weights = floats_of(job, tile, row);
    const float* x[kFewTokens];
#pragma unroll
    for (int t = 0; t < kFewTokens; ++t) x[t] = x_row(job, tile.head, blockIdx.y, min(t, job.tokens - 1));
    float sums[kFewTokens] = {};
    for (int first = lane; first < job.k; first += kAtOnce * kWarp) {
        float w[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int at = first + i * kWarp;
            w[i] = at < job.k ? weights[at] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int at = first + i * kWarp;
            if (at >= job.k) break;
#pragma unroll
            for (int t = 0; t < kFewTokens; ++t) {
                if (t < job.tokens) sums[t] = fmaf(w[i], x[t][at], sums[t]);
            }
        }
    }
#pragma unroll
    for (int t = 0; t < kFewTokens; ++t) {
        for (int offset = kWarp / 2; offset; offset /= 2)
            sums[t] += __shfl_xor_sync(0xffffffff, sums[t], offset);
        if (lane == 0 && t < job.tokens)
            out_at(job, tile, blockIdx.y, t, row) = sums[t] + bias_at(job, tile, row);
    }
}

constexpr int kSide = 64, kDeep = 16, kEach = 4;  // of a tile, of a step, of a thread
constexpr int kRowsAtOnce = kThreads / kDeep;

/// Element threadIdx.x % kDeep of a step of rows threadIdx.x / kDeep, + kRowsAtOnce, ...; zeros beyond.
template <class RowAt>
__device__ void load_step(float (&to)[kEach], RowAt&& row_at, int rows, int first, int k) {
    const int at = first + threadIdx.x % kDeep;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int row = threadIdx.x / kDeep + i * kRowsAtOnce;
        to[i] = row < rows && at < k ? row_at(row)[at] : 0.0f;
    }
}

using Step = float[kDeep][kSide + 4];

__device__ void store_step(Step& to, const float (&from)[kEach]) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) to[threadIdx.x % kDeep][threadIdx.x / kDeep + i * kRowsAtOnce] = from[i];
}

__global__ void many_float_kernel(Job job) {
    __shared__ __align__(16) Step x_step, w_step;
    const Tile tile = tile_at(job, blockIdx.y, kSide);
    const int sibling = blockIdx.x % job.group, token = blockIdx.x / job.group * kSide;
    const auto x_at = [&](int t) { return x_row(job, tile.head, sibling, token + t); };
    const auto w_at = [&](int row) { return floats_of(job, tile, tile.row + row); };
    const int own_token = threadIdx.x / (kSide / kEach) * kEach,
              own_row = threadIdx.x % (kSide / kEach) * kEach;
    float sums[kEach][kEach] = {}, x_next[kEach], w_next[kEach];
    const auto load = [&](int first) {
        load_step(x_next, x_at, job.tokens - token, first, job.k);
        load_step(w_next, w_at, job.parts[tile.part].rows - tile.row, first, job.k);
    };
    load(0);
    for (int first = 0; first < job.k; first += kDeep) {
        store_step(x_step, x_next);
        store_step(w_step, w_next);
        __syncthreads();
        load(first + kDeep);
#pragma unroll
        for (int k = 0; k < kDeep; ++k) {
            const float4 a = *reinterpret_cast<const float4*>(&x_step[k][own_token]);
            const float4 b = *reinterpret_cast<const float4*>(&w_step[k][own_row]);
            const float x[kEach] = {a.x, a.y, a.z, a.w}, w[kEach] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (int i = 0; i < kEach * kEach; ++i) {
                float& sum = sums[i / kEach][i % kEach];
                sum = fmaf(x[i / kEach], w[i % kEach], sum);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < kEach * kEach; ++i) {
        const int t = token + own_token + i / kEach, row = tile.row + own_row + i % kEach;
        if (t < job.tokens && row < job.parts[tile.part].rows)
            out_at(job, tile, sibling, t, row) = sums[i / kEach][i % kEach] + bias_at(job, tile, row);
    }
}

}  // namespace

void float_products(const Device& device, const Job& job) {
    const Shape few{.grid = dim3(tiles_of(job, kWarps), job.group), .block = dim3(kThreads)};
    const Shape many{.grid = dim3(divide_up(job.tokens, kSide) * job.group, tiles_of(job, kSide)),
                     .block = dim3(kThreads)};
    if (job.tokens <= kFewTokens)
        launch(device, few_float_kernel, few, job);
    else
        launch(device, many_float_kernel, many, job);
}

}  // namespace slimrt::cuda
