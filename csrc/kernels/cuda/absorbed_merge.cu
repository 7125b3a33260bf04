// The last step of an absorbed attention: merges, in f32, its splits, each query's own row and the earlier
// result in out, by log-sum-exp (as flash-decoding does).
#include "kernels/cuda/absorbed_plan.h"

namespace slimrt::cuda {
namespace {

constexpr int kMergeThreads = 256, kMergeColumns = 4 * kMergeThreads;

__device__ float block_sum(float sum) {
    __shared__ float of_warp[kMergeThreads / 32];
    for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
    for (const float some : of_warp) sum += some;
    return sum;
}

/// This thread's part of q . rope(fresh * scale * factor + bias).
__device__ float fresh_head_score(const HeadScores& head, int64_t token, int64_t position, int of) {
    const int first = of / head.group * head.dim;
    const float* const q = head.q + token * head.q_stride + int64_t(of) * head.q_head;
    const float* const row = head.fresh + token * head.fresh_stride + first;
    const float* const factors = head.fresh_factors + token * head.factors_stride;
    const float factor = head.has_factors ? factors[head.head_factors ? of / head.group : 0] : 1;
    const auto key = [&](int c) {
        float k = row[c];
        if (head.row_scale) k *= head.row_scale[first + c] * factor;
        return head.bias ? k + head.bias[first + c] : k;
    };
    float sum = 0;
    for (int pair = static_cast<int>(threadIdx.x); pair < head.dim / 2; pair += kMergeThreads) {
        const bool rotates = head.table && pair < head.n_rot / 2, apart = rotates && !head.interleaved;
        const int c = apart ? pair : 2 * pair, d = apart ? pair + head.n_rot / 2 : c + 1;
        const float a = key(c), b = key(d);
        const float* const rope_row = head.table + position * head.n_rot + 2 * pair;
        const float cosine = rotates ? rope_row[0] : 1, sine = rotates ? rope_row[1] : 0;
        sum += q[c] * (cosine * a - sine * b) + q[d] * (sine * a + cosine * b);
    }
    return sum;
}

__device__ float fresh_score(const Absorbed& x, int64_t token, int64_t position, int head) {
    float sum = 0;
    if (x.head.dim) sum = fresh_head_score(x.head, token, position, head);
    const float* const q = x.wide.q + token * x.wide.q_stride + int64_t(head) * x.wide.q_head;
    const float* const row = x.wide.fresh + token * x.wide.fresh_stride;
    for (int c = static_cast<int>(threadIdx.x); c < x.wide.dim; c += kMergeThreads) sum += q[c] * row[c];
    return finish_score(x.finish, block_sum(sum), x.scale, true, head, 0);
}

__global__ void __launch_bounds__(kMergeThreads) merge_kernel(const __grid_constant__ Absorbed x) {
    __shared__ float2 ends[kMaxSplits];
    __shared__ float weights[kMaxSplits];
    const int thread = static_cast<int>(threadIdx.x), head = static_cast<int>(blockIdx.y);
    const PlacedSequence& sequence = x.placed[blockIdx.z];
    const int64_t token = sequence.query + x.query_shift, job = int64_t(blockIdx.z) * x.splits;
    if (thread < x.splits)
        ends[thread] = reinterpret_cast<const float2*>(x.ends)[(job + thread) * x.n_heads + head];
    __syncthreads();
    const float own = sequence.fresh ? fresh_score(x, token, sequence.position, head) : -__builtin_inff();
    float* const lse = x.lse ? x.lse + token * x.lse_stride + head : nullptr;
    const float before = x.merge ? *lse : -__builtin_inff(), sink = x.finish.sink(head);
    float high = max(max(own, before), sink), total = 0;
    for (int i = 0; i < x.splits; ++i) high = max(high, ends[i].x);
    const float reference = high > -__builtin_inff() ? high : 0;  // no visible row, or only NaN
    for (int i = 0; i < x.splits; ++i) total += __expf(ends[i].x - reference) * ends[i].y;
    const float own_weight = sequence.fresh ? __expf(own - reference) : 0;
    const float kept_weight = __expf(before - reference);
    total += own_weight + kept_weight + __expf(sink - reference);
    const float share = total == 0 ? 0 : 1 / total;
    if (thread < x.splits)  // 0: nothing was written to partial
        weights[thread] = ends[thread].y == 0 ? 0 : __expf(ends[thread].x - reference) * share;
    __syncthreads();
    if (lse && blockIdx.x == 0 && thread == 0) *lse = reference + logf(total);

    const int step = static_cast<int>(gridDim.x) * kMergeColumns;
    for (int column = static_cast<int>(blockIdx.x) * kMergeColumns + 4 * thread; column < x.columns;
         column += step) {
        const bool first = column < x.rows.width;
        const AbsorbedValues& values = x.values[first ? 0 : 1];
        const int within = first ? column : column - x.rows.width;
        float* const out = values.out + token * values.out_stride + int64_t(head) * values.out_head + within;
        float4 sum = {0, 0, 0, 0};
        const auto add = [&](float weight, const float* from) {
            const float4 some = weight != 0 ? *reinterpret_cast<const float4*>(from) : float4{0, 0, 0, 0};
            sum = {sum.x + weight * some.x, sum.y + weight * some.y, sum.z + weight * some.z,
                   sum.w + weight * some.w};
        };
        if (sequence.fresh) add(own_weight * share, values.fresh + token * values.fresh_stride + within);
        const float* const partial = x.partial + (job * x.n_heads + head) * x.columns + column;
        const int64_t next = int64_t(x.n_heads) * x.columns;
#pragma unroll 8  // loads in flight
        for (int i = 0; i < x.splits; ++i) add(weights[i], partial + i * next);
        add(kept_weight * share, out);
        *reinterpret_cast<float4*>(out) = sum;
    }
}

}  // namespace

void absorbed_merge(const Device& device, const Absorbed& x) {
    // lse must be read before it is written: with merge one block has all columns of a head.
    const unsigned chunks = x.merge ? 1 : (x.columns + kMergeColumns - 1) / kMergeColumns;
    launch(device, merge_kernel, {.grid = dim3(chunks, x.n_heads, x.sequences), .block = dim3(kMergeThreads)},
           x);
}

}  // namespace slimrt::cuda
