// Layers with experts. What is launched does not depend on the choice of experts: a block multiplies rows of
// the expert that its pair of a token and an expert names, so that a step can be recorded. At decoding each
// pair reads its weights. In a prompt pairs are sorted by expert, on the device, and tiles of pairs share the
// weights that they read; there are as many tiles as any choice could need, some of them empty.
#include <algorithm>

#include "kernels/cuda/kernels.h"
#include "kernels/cuda/linear_job.cuh"

namespace slimrt::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp, kOrdering = 1024;

/// Numbers come before NaN, larger ones before smaller, of equal ones the lower id.
__device__ bool before(float score, int id, float other, int other_id) {
    const bool number = score == score, other_number = other == other;
    if (number != other_number) return number;
    if (number && score != other) return score > other;
    return id < other_id;
}

struct Best {
    float score;
    int id;
};

/// The best of numbers i < n for which `left`, in all lanes; lane i % 32 has number i.
template <class Left, class Value>
__device__ Best best_in_warp(int n, const Left& left, const Value& value) {
    Best best{0, n};
    for (int i = threadIdx.x % kWarp; i < n; i += kWarp) {
        if (!left(i)) continue;
        const float score = value(i);
        if (best.id == n || before(score, i, best.score, best.id)) best = {score, i};
    }
    for (int offset = kWarp / 2; offset; offset /= 2) {
        const Best other{__shfl_xor_sync(0xffffffff, best.score, offset),
                         __shfl_xor_sync(0xffffffff, best.id, offset)};
        if (other.id < n && (best.id == n || before(other.score, other.id, best.score, best.id)))
            best = other;
    }
    return best;
}

__device__ float sum_in_warp(float x) {
    for (int offset = kWarp / 2; offset; offset /= 2) x += __shfl_xor_sync(0xffffffff, x, offset);
    return x;
}

/// What a token's experts are chosen by, and their weights before these are renormalised.
struct Scores {
    bool sigmoid;
    const float *s, *bias;
    float high = 0, sum = 1;  // of the softmax

    __device__ float share(int i) const { return sigmoid ? 1 / (1 + expf(-s[i])) : expf(s[i] - high) / sum; }
    __device__ float operator()(int i) const {
        return sigmoid || bias ? share(i) + (bias ? bias[i] : 0.0f) : s[i];
    }
    __device__ void find_sum(int n) {
        const float* const scores = s;
        high = best_in_warp(n, [](int) { return true; }, [=](int i) { return scores[i]; }).score;
        sum = 0;
        for (int i = threadIdx.x % kWarp; i < n; i += kWarp) sum += expf(s[i] - high);
        sum = sum_in_warp(sum);
    }
    /// The score of experts [first, first + n) as a group: the best one's, with sigmoids the sum of the best
    /// two.
    __device__ float of_group(int first, int n) const {
        Best best{0, -1}, second{0, -1};
        for (int i = first; i < first + n; ++i) {
            const Best one{(*this)(i), i};
            if (best.id < 0 || before(one.score, i, best.score, best.id))
                second = best, best = one;
            else if (second.id < 0 || before(one.score, i, second.score, second.id))
                second = one;
        }
        return sigmoid && second.id >= 0 ? best.score + second.score : best.score;
    }
};

/// The best one's softmax weight among those that are left and near it (SparseMixer).
template <class Left>
__device__ float share_among_near(float near, const float* scores, int n, const Left& left, int best) {
    const float high = scores[best];
    float sum = 0;
    for (int i = threadIdx.x % kWarp; i < n; i += kWarp)
        if (left(i) && !((high - scores[i]) / fmaxf(fabsf(scores[i]), high) > near))
            sum += expf(scores[i] - high);
    return 1 / sum_in_warp(sum);
}

/// A bit for each chosen group. A lane a group.
__device__ uint32_t chosen_groups(const Router& router, const Scores& scores, int n) {
    const int lane = threadIdx.x % kWarp, size = n / router.groups;
    const float of_group = lane < router.groups ? scores.of_group(lane * size, size) : 0;
    uint32_t chosen = 0;
    for (int j = 0; j < router.groups_used; ++j) {
        const auto left = [&](int g) { return !(chosen >> g & 1); };
        chosen |= 1u << best_in_warp(router.groups, left, [&](int) { return of_group; }).id;
    }
    return chosen;
}

/// A warp a token; lane i % 32 has score i, and at most 32 scores (kMaxExperts).
__global__ void route_kernel(Router router, const unsigned char* scores, size_t stride, const float* bias,
                             int n_tokens, int n, int taken, int32_t* ids, float* shares) {
    const int token = blockIdx.x * kWarps + threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    if (token >= n_tokens) return;
    Scores of{router.sigmoid, reinterpret_cast<const float*>(scores + token * stride), bias};
    if (!router.sigmoid) of.find_sum(n);
    uint32_t marks = 0;  // experts that are taken, or in no chosen group
    if (router.groups > 1) {
        const uint32_t chosen = chosen_groups(router, of, n);
        for (int i = lane; i < n; i += kWarp)
            if (!(chosen >> i / (n / router.groups) & 1)) marks |= 1u << i / kWarp;
    }
    float sum = kLeastShares;
    for (int j = 0; j < taken; ++j) {
        const auto left = [&](int i) { return !(marks >> i / kWarp & 1); };
        const int id = best_in_warp(n, left, of).id;
        const float share = router.near > 0 ? share_among_near(router.near, of.s, n, left, id) : of.share(id);
        if (id % kWarp == lane) marks |= 1u << id / kWarp;
        sum += share;
        if (lane == 0) {
            ids[token * taken + j] = id;
            shares[token * taken + j] = share;
        }
    }
    __syncwarp();
    const float factor = router.renormalised ? router.scale / sum : router.scale;
    for (int j = lane; j < taken; j += kWarp) shares[token * taken + j] *= factor;
}

constexpr int64_t kMostRows = 65535;  // of a grid

/// out[i] = sum over j of shares[i][j] * scale * rows[i * taken + j]; scales: by expert, or none.
__global__ void combine_kernel(const float* rows, const int32_t* ids, const float* shares,
                               const float* scales, int taken, int width, unsigned char* out, size_t stride,
                               int tokens) {
    const int column = blockIdx.x * kThreads + threadIdx.x;
    if (column >= width) return;
    for (int token = blockIdx.y; token < tokens; token += gridDim.y) {
        float sum = 0;
        for (int j = 0; j < taken; ++j) {
            const int64_t pair = int64_t(token) * taken + j;
            const float share = scales ? shares[pair] * scales[ids[pair]] : shares[pair];
            sum = fmaf(share, rows[pair * width + column], sum);
        }
        reinterpret_cast<float*>(out + token * stride)[column] = sum;
    }
}

/// Sorts pairs by expert (within an expert in any order, since no sum depends on it), and makes tiles of
/// them. One block.
__global__ void order_kernel(const int32_t* ids, int pairs, int n_experts, int tile, int n_tiles,
                             int32_t* order, Places* places) {
    __shared__ int at[kMaxExperts];  // how many there are, then where the next one goes
    for (int e = threadIdx.x; e < n_experts; e += blockDim.x) at[e] = 0;
    __syncthreads();
    for (int p = threadIdx.x; p < pairs; p += blockDim.x) atomicAdd(&at[ids[p]], 1);
    __syncthreads();
    if (threadIdx.x == 0) {
        int begin = 0, t = 0;
        for (int e = 0; e < n_experts; ++e) {
            const int end = begin + at[e];
            for (int first = begin; first < end; first += tile) places[t++] = {first, min(first + tile, end)};
            at[e] = begin;
            begin = end;
        }
        while (t < n_tiles) places[t++] = {0, 0};
    }
    __syncthreads();
    for (int p = threadIdx.x; p < pairs; p += blockDim.x) order[atomicAdd(&at[ids[p]], 1)] = p;
}

/// Layout of the workspace: gates, ups and outs of pairs and, for many tokens, what Ordered holds.
struct Parts {
    size_t rounded_at, inverse_at, places_at, order_at, bytes;
    int tile, n_tiles = 0;  // 0: a pair at a time

    Parts(const Experts& e, Tensor x, Tensor ids) {
        const int64_t inner = e.inner(), pairs = ids.rows * ids.cols;
        const auto row = [](int64_t k) { return size_t(k + kStep - 1) / kStep * kStep * 2; };
        const auto after = [](size_t at, size_t size) { return at + (size + 255) / 256 * 256; };
        rounded_at = after(0, size_t(pairs * (2 * inner + x.cols)) * sizeof(float));
        bytes = rounded_at;
        if (x.rows <= kFewTokens || pairs < 2 * e.n) return;
        tile = ordered_tile(int(pairs), e.n);
        n_tiles = int(pairs / tile + std::min<int64_t>(pairs, e.n));
        inverse_at = after(rounded_at, std::max(x.rows * row(x.cols), pairs * row(inner)));
        places_at = after(inverse_at, pairs * sizeof(float));
        order_at = after(places_at, n_tiles * sizeof(Places));
        bytes = after(order_at, pairs * sizeof(int32_t));
    }

    Ordered ordered(std::byte* workspace) const {
        if (!n_tiles) return {};
        return {reinterpret_cast<const int32_t*>(workspace + order_at),
                reinterpret_cast<const Places*>(workspace + places_at),
                tile,
                n_tiles,
                reinterpret_cast<uint16_t*>(workspace + rounded_at),
                reinterpret_cast<float*>(workspace + inverse_at)};
    }
};

unsigned blocks_of(int64_t n, int each) { return static_cast<unsigned>((n + each - 1) / each); }

}  // namespace

void route(const Device& device, const Router& router, Tensor scores, Tensor bias, Tensor ids,
           Tensor shares) {
    if (scores.rows == 0) return;
    const Shape shape{.grid = dim3(blocks_of(scores.rows, kWarps)), .block = dim3(kThreads)};
    launch(device, route_kernel, shape, router, reinterpret_cast<const unsigned char*>(scores.data),
           scores.stride, bias ? bias.f32() : nullptr, int(scores.rows), int(scores.cols), int(ids.cols),
           ids.i32(), shares.f32());
}

size_t experts_workspace(const Experts& experts, Tensor x, Tensor ids) {
    return Parts(experts, x, ids).bytes;
}

void experts(const Device& device, Activation kind, const Experts& e, Tensor x, Tensor ids, Tensor shares,
             Tensor out, std::byte* workspace) {
    if (x.rows == 0) return;
    const Parts parts(e, x, ids);
    const int64_t inner = e.inner(), pairs = ids.rows * ids.cols;
    const Tensor gates(workspace, DType::F32, pairs, inner), ups(gates.row(pairs), DType::F32, pairs, inner),
        outs(ups.row(pairs), DType::F32, pairs, x.cols);
    const Product first[] = {{e.gate, e.gate_bias, gates}, {e.ups(), e.up_bias, ups}};
    const Product second[] = {{e.down, e.down_bias, outs}};
    const Ordered ordered = parts.ordered(workspace);
    if (parts.n_tiles)
        launch(device, order_kernel, {.grid = dim3(1), .block = dim3(kOrdering)}, ids.i32(), int(pairs), e.n,
               ordered.tile, ordered.n_tiles, const_cast<int32_t*>(ordered.order),
               const_cast<Places*>(ordered.places));
    linear_experts(device, x, int(ids.cols), ids, e.step(), first, parts.n_tiles ? &ordered : nullptr);
    gate(device, kind, gates, ups);
    linear_experts(device, gates, 1, ids, x.cols, second, parts.n_tiles ? &ordered : nullptr);
    const auto rows = unsigned(std::min<int64_t>(x.rows, kMostRows));
    const Shape shape{.grid = dim3(blocks_of(x.cols, kThreads), rows), .block = dim3(kThreads)};
    launch(device, combine_kernel, shape, outs.f32(), ids.i32(), shares.f32(),
           e.scale ? e.scale.f32() : nullptr, int(ids.cols), int(x.cols),
           reinterpret_cast<unsigned char*>(out.data), out.stride, int(x.rows));
}

}  // namespace slimrt::cuda
