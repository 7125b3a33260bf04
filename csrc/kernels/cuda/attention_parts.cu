// Merges partial results; AttentionArgs as a view for kernels.
#include <algorithm>
#include <numeric>

#include "kernels/cuda/attention_parts.cuh"
#include "kernels/cuda/ptx.cuh"

namespace slimrt::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kMaxParts = 128;

/// A block for every (query, head).
__global__ void merge_kernel(AttentionView a, Parts parts) {
    begin_early();
    __shared__ float weights[kMaxParts];
    __shared__ MergeFactors share;
    const int head = blockIdx.x % a.n_heads, query = blockIdx.x / a.n_heads;
    const PlacedSequence& s = a.sequences[blockIdx.y];
    if (query >= s.n_queries) return;
    const int64_t row = s.query + a.query_shift + query, pair = pair_of(a, blockIdx.y, query, head);
    const float2* const states = parts.states + pair * parts.n;
    if (threadIdx.x < kWarp) {  // loads of all parts are in flight at once
        float2 state[kMaxParts / kWarp];
        float high = -infinity(), sum = 0;
#pragma unroll
        for (int i = 0; i < kMaxParts / kWarp; ++i) {
            const int part = i * kWarp + threadIdx.x;
            state[i] = part < parts.n ? states[part] : float2{-infinity(), 0};
            high = fmaxf(high, state[i].x);
        }
        for (int lanes = kWarp / 2; lanes > 0; lanes /= 2)
            high = fmaxf(high, __shfl_xor_sync(~0u, high, lanes));
#pragma unroll
        for (int i = 0; i < kMaxParts / kWarp; ++i) {
            const float weight = state[i].y == 0 ? 0 : exp2f(state[i].x - reference(high));
            weights[i * kWarp + threadIdx.x] = weight;
            sum += weight * state[i].y;
        }
        for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
        if (threadIdx.x == 0) share = finish(a, row, head, high, sum);
    }
    __syncthreads();
    for (int column = threadIdx.x; column < a.value_columns; column += blockDim.x) {
        const float* const values = parts.values + pair * parts.n * a.value_columns + column;
        float sum = 0;
#pragma unroll 8
        for (int i = 0; i < parts.n; ++i) {
            const float value = values[int64_t(i) * a.value_columns];  // undefined where the weight is 0
            sum = weights[i] == 0 ? sum : fmaf(weights[i], value, sum);
        }
        write(a.result(row, head, column), share, sum);
    }
}

int value_columns(const AttentionArgs& args) {
    int columns = 0;
    for (const ValueTerm& term : args.values) columns += term.dim;
    return columns;
}

int64_t pairs(const AttentionArgs& args) {
    return int64_t(args.sequences.size()) * most_queries(args) * args.n_heads;
}

ScoreView view_of(const ScoreTerm& term, int n_heads) {
    ScoreView v;
    v.stored = RowsView(term.stored);
    v.factors = RowsView(term.factors);
    v.fresh = FloatRows(term.fresh);
    v.fresh_factors = FloatRows(term.fresh_factors);
    v.head_factors = term.fresh_factors.cols > 1;
    v.q = FloatRows(term.q);
    v.row_scale = term.row_scale ? term.row_scale.f32() : nullptr;
    v.bias = term.bias ? term.bias.f32() : nullptr;
    v.n_heads = term.n_heads;
    v.dim = term.dim;
    v.q_columns = static_cast<int>(term.q.cols / n_heads);
    if (term.rope) {
        v.rope_table = FloatRows(term.rope.table);
        v.n_rot = term.rope.n_rot;
        v.interleaved = term.rope.interleaved;
    }
    return v;
}

ValueView view_of(const ValueTerm& term, int n_heads) {
    ValueView v;
    v.stored = RowsView(term.stored);
    v.fresh = FloatRows(term.fresh);
    v.out = FloatRows(term.out);
    v.n_heads = term.n_heads;
    v.dim = term.dim;
    v.out_columns = static_cast<int>(term.out.cols / n_heads);
    return v;
}

}  // namespace

int most_queries(const AttentionArgs& args) {
    int most = 0;
    for (const AttentionSequence& s : args.sequences) most = std::max(most, s.n_queries);
    return most;
}

AttentionView view_of(const AttentionArgs& args, const PlacedSequence* placed, int query_shift,
                      SparseCounts* counts) {
    AttentionView v;
    for (const ScoreTerm& term : args.scores) v.scores[v.n_scores++] = view_of(term, args.n_heads);
    for (const ValueTerm& term : args.values) v.values[v.n_values++] = view_of(term, args.n_heads);
    v.finish = ScoreFinish(args, kLog2E);
    v.lse = FloatRows(args.lse);
    v.sequences = placed;
    v.counts = counts;
    v.window = args.window;
    v.n_heads = args.n_heads;
    v.value_columns = value_columns(args);
    v.query_shift = query_shift;
    v.most_queries = most_queries(args);
    v.scale = args.scale * kLog2E;
    v.sparse_threshold = args.sparse_threshold;
    v.merge = args.merge;
    return v;
}

size_t part_bytes(const AttentionArgs& args, int n_parts) {
    return pairs(args) * n_parts * (value_columns(args) * sizeof(float) + sizeof(float2));
}

Parts place_parts(const AttentionArgs& args, int n_parts, std::byte* workspace) {
    Parts parts{n_parts, nullptr, reinterpret_cast<float2*>(workspace)};
    parts.values = reinterpret_cast<float*>(parts.states + pairs(args) * n_parts);
    return parts;
}

int parts_for(const AttentionArgs& args, int64_t blocks, int64_t places, int most) {
    constexpr int64_t kEnough = 8;  // times as many blocks as run at once: then the last wave matters little
    constexpr double kGoodShare = 0.925;  // of the blocks that could run, on average
    if (blocks == 0 || blocks >= kEnough * places) return 1;
    most = std::min(most, kMaxParts);
    int best = 1;
    double best_share = 0;
    for (int n = 1; n <= most && part_bytes(args, n) <= kMaxPartBytes; ++n) {
        const int64_t waves = (blocks * n + places - 1) / places;
        const double share = double(blocks * n) / double(waves * places);
        if (share > best_share) best = n, best_share = share;
        if (share >= kGoodShare) break;
    }
    return best;
}

void merge_parts(const Device& device, const AttentionArgs& args, const AttentionView& view,
                 const Parts& parts) {
    launch(device, merge_kernel,
           {.grid = dim3(unsigned(most_queries(args) * args.n_heads), unsigned(args.sequences.size())),
            .block = dim3(kThreads),
            .early = true},
           view, parts);
}

}  // namespace slimrt::cuda
