// Products with F32 weights. Few tokens: in float32, a warp a row of the weight, eight loads in flight. Many:
// rows of x and of the weight are split in the workspace, each number into two of f16, for three products in
// tensor cores (linear_many.cu); of a weight some rows at a time, which the L2 cache of large devices holds.
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

constexpr size_t kSliceBytes = size_t(32) << 20;

/// A block a row.
__global__ void split_kernel(Job job, uint16_t* to, float* inverse, int stride) {
    constexpr int kTop = 14;  // exponent that the largest magnitude gets
    __shared__ uint32_t largest_of[kWarps];
    const int token = blockIdx.x / job.all_heads(), columns = blockIdx.x % job.all_heads();
    const float* const from = x_row(job, columns / job.group, columns % job.group, token);
    const bool in_packs = reinterpret_cast<uintptr_t>(from) % sizeof(Pack<float, 4>) == 0;
    const auto load = [&](int at) {
        if (in_packs && at + 4 <= job.k) return load_pack<4>(from + at);
        Pack<float, 4> v;
        for (int i = 0; i < 4; ++i) v.at[i] = at + i < job.k ? from[at + i] : 0.0f;
        return v;
    };
    uint32_t largest = 0;
    for (int at = 4 * threadIdx.x; at < job.k; at += 4 * kThreads)
        for (const float x : load(at).at) largest = max(largest, __float_as_uint(x) & 0x7fffffff);
    largest = largest_in_warp(largest);
    if (threadIdx.x % kWarp == 0) largest_of[threadIdx.x / kWarp] = largest;
    __syncthreads();
    for (const uint32_t other : largest_of) largest = max(largest, other);
    const int shift = min(kTop - exponent_of(largest), 126);
    const float factor = power_of_2(shift);
    for (int at = 4 * threadIdx.x; at < stride / 2; at += 4 * kThreads) {
        const Pack<float, 4> v = load(at);
        Pack<uint16_t, 4> high, low;
        for (int i = 0; i < 4; ++i) {
            const float x = v.at[i] * factor;
            high.at[i] = to_f16(x);
            low.at[i] = to_f16(x - from_f16(high.at[i]));
        }
        uint16_t* const of_row = to + size_t(blockIdx.x) * stride + split_at(at);
        store_pack(of_row, high);
        store_pack(of_row + kSplitRun, low);
    }
    if (threadIdx.x == 0) inverse[blockIdx.x] = power_of_2(-shift);
}

/// Rows of a part that are split at a time; of several heads all.
int slice_rows(const Job& job, const Part& part) {
    constexpr int kTile = 128;
    if (job.all_heads() > 1) return part.rows;
    const int fit = int(kSliceBytes / (size_t(split_stride(job.k)) * 2)) / kTile * kTile;
    return std::min(part.rows, std::max(fit, kTile));
}

/// Rows of a part from `first` on as linear_many.cu multiplies them, but for where they are split to.
Job slice_of(const Job& job, const Part& part, int first) {
    Job slice = job;
    slice.k = split_stride(job.k);
    slice.split = true;
    slice.n_parts = 1;
    Part& own = slice.parts[0] = part;
    own.stride = size_t(slice.k) * 2;
    own.rows = std::min(slice_rows(job, part), part.rows - first);
    if (part.bias) own.bias += first;
    own.out += first * sizeof(float);
    return slice;
}

size_t weight_rows(const Job& slice) { return size_t(slice.heads) * slice.parts[0].rows; }

}  // namespace

void few_floats(const Device& device, const Job& job) {
    const Shape shape{.grid = dim3(tiles_of(job, kWarps), job.group), .block = dim3(kThreads)};
    launch(device, few_float_kernel, shape, job);
}

void split_rows(const Device& device, const Job& job, const Rounded& to) {
    const Shape shape{.grid = dim3(job.tokens * job.all_heads()), .block = dim3(kThreads)};
    launch(device, split_kernel, shape, job, const_cast<uint16_t*>(to.x), const_cast<float*>(to.inverse),
           to.stride);
}

size_t float_bytes(const Device& device, const Job& job) {
    size_t most = 0;
    for (int p = 0; p < job.n_parts; ++p) {
        const Part& part = job.parts[p];
        const int rows = slice_rows(job, part), last = (part.rows - 1) / rows * rows;
        const Job whole = slice_of(job, part, 0), rest = slice_of(job, part, last);
        most = std::max(most, weight_rows(whole) * (whole.parts[0].stride + sizeof(float)) +
                                  std::max(split_bytes(device, whole), split_bytes(device, rest)));
    }
    return most;
}

void float_products(const Device& device, const Job& job, const Rounded& x, std::byte* workspace) {
    for (int p = 0; p < job.n_parts; ++p) {
        const Part& part = job.parts[p];
        for (int first = 0; first < part.rows; first += slice_rows(job, part)) {
            Job slice = slice_of(job, part, first);
            const size_t rows = weight_rows(slice);
            auto* const inverse = reinterpret_cast<float*>(workspace + rows * slice.parts[0].stride);
            const Rounded weight{
                .x = reinterpret_cast<const uint16_t*>(workspace), .inverse = inverse, .stride = slice.k};
            const Job of_weight{.x = part.weight + first * part.stride,
                                .x_stride = part.stride,
                                .tokens = int(rows),
                                .k = job.k};
            split_rows(device, of_weight, weight);
            slice.parts[0].weight = reinterpret_cast<const unsigned char*>(workspace);
            slice.parts[0].inverse = inverse;
            many_floats(device, slice, x, inverse + rows);
        }
    }
}

}  // namespace slimrt::cuda
