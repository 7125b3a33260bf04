// Feed-forward networks of which each token takes a few. What is started does not depend on which: a block
// multiplies rows of the expert that its pair of a token and an expert names, so a step with them can be
// recorded. Every pair reads its weights: at decoding they are the limit, of a prompt most reads are the
// second-level cache's, and tiles of an expert's tokens would take fewer.
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/numbers.cuh"

namespace slimrt::cuda {
namespace {

constexpr int kWarp = 32, kThreads = 256, kWarps = kThreads / kWarp;

/// Of numbers before what is none, the larger one, of equals that with the lower id.
__device__ bool before(float score, int id, float other, int other_id) {
    const bool number = score == score, other_number = other == other;
    if (number != other_number) return number;
    if (number && score != other) return score > other;
    return id < other_id;
}

/// A warp a token; score i is lane i % 32's, of which there are at most 32 (kMaxExperts).
__global__ void route_kernel(Router router, const unsigned char* scores, size_t stride, int n_tokens, int n,
                             int taken, int32_t* ids, float* shares) {
    const int token = blockIdx.x * kWarps + threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    if (token >= n_tokens) return;
    const float* const s = reinterpret_cast<const float*>(scores + token * stride);
    uint32_t marks = 0;  // those that are taken
    float high = 0, sum = 0, chosen = 0;
    for (int j = 0; j < taken; ++j) {
        float best = 0;
        int id = n;
        for (int i = lane; i < n; i += kWarp)
            if (!(marks >> i / kWarp & 1) && (id == n || before(s[i], i, best, id))) best = s[i], id = i;
        for (int offset = kWarp / 2; offset; offset /= 2) {
            const float other = __shfl_xor_sync(0xffffffff, best, offset);
            const int other_id = __shfl_xor_sync(0xffffffff, id, offset);
            if (other_id < n && (id == n || before(other, other_id, best, id))) best = other, id = other_id;
        }
        if (id % kWarp == lane) marks |= 1u << id / kWarp;
        if (j == 0) {
            high = best;
            for (int i = lane; i < n; i += kWarp) sum += expf(s[i] - high);
            for (int offset = kWarp / 2; offset; offset /= 2) sum += __shfl_xor_sync(0xffffffff, sum, offset);
        }
        const float share = expf(best - high) / sum;
        chosen += share;
        if (lane == 0) {
            ids[token * taken + j] = id;
            shares[token * taken + j] = share;
        }
    }
    __syncwarp();
    const float factor = router.renormalised ? router.scale / chosen : router.scale;
    for (int j = lane; j < taken; j += kWarp) shares[token * taken + j] *= factor;
}

/// out[i] = sum over j of shares[i][j] * rows[i * taken + j].
__global__ void combine_kernel(const float* rows, const float* shares, int taken, int width,
                               unsigned char* out, size_t stride) {
    const int token = blockIdx.y, column = blockIdx.x * kThreads + threadIdx.x;
    if (column >= width) return;
    float sum = 0;
    for (int j = 0; j < taken; ++j) {
        const int64_t pair = int64_t(token) * taken + j;
        sum = fmaf(shares[pair], rows[pair * width + column], sum);
    }
    reinterpret_cast<float*>(out + token * stride)[column] = sum;
}

unsigned blocks_of(int64_t n, int each) { return static_cast<unsigned>((n + each - 1) / each); }

}  // namespace

void route(const Device& device, const Router& router, Tensor scores, Tensor ids, Tensor shares) {
    if (scores.rows == 0) return;
    const Shape shape{.grid = dim3(blocks_of(scores.rows, kWarps)), .block = dim3(kThreads)};
    launch(device, route_kernel, shape, router, reinterpret_cast<const unsigned char*>(scores.data),
           scores.stride, int(scores.rows), int(scores.cols), int(ids.cols), ids.i32(), shares.f32());
}

size_t experts_workspace(const Experts& experts, Tensor x, Tensor ids) {
    const int64_t inner = experts.up.rows / experts.n;
    return size_t(ids.rows * ids.cols * (2 * inner + x.cols)) * sizeof(float);
}

void experts(const Device& device, Activation kind, const Experts& e, Tensor x, Tensor ids, Tensor shares,
             Tensor out, std::byte* workspace) {
    if (x.rows == 0) return;
    const int64_t inner = e.up.rows / e.n, pairs = ids.rows * ids.cols;
    const Tensor gates(workspace, DType::F32, pairs, inner), ups(gates.row(pairs), DType::F32, pairs, inner),
        outs(ups.row(pairs), DType::F32, pairs, x.cols);
    const Product first[] = {{e.gate, {}, gates}, {e.up, {}, ups}}, second[] = {{e.down, {}, outs}};
    linear_experts(device, x, int(ids.cols), ids, e.n, first);
    gate(device, kind, gates, ups);
    linear_experts(device, gates, 1, ids, e.n, second);
    const Shape shape{.grid = dim3(blocks_of(x.cols, kThreads), unsigned(x.rows)), .block = dim3(kThreads)};
    launch(device, combine_kernel, shape, outs.f32(), shares.f32(), int(ids.cols), int(x.cols),
           reinterpret_cast<unsigned char*>(out.data), out.stride);
}

}  // namespace slimrt::cuda
