// Attention of many queries a sequence over planes of their own heads: prompts, encoders, few queries too.
//
// A block has 64 (query, head) pairs of one head of K (and of V, whose heads may be fewer), a warp 16 of
// them; it goes through the rows they see, 64 at a time (fewer where they are wide), as tiles of 16-bit
// numbers in shared memory. Products are mma of 16 x 8 x 16; softmax weights stay in registers, where the
// first product leaves them as the second one wants them. F32 rows become two f16 numbers each, and so do
// queries and weights: three products instead of one, as exact as float32 to a few units.
#include <algorithm>

#include "kernels/cuda/attention_prefill.cuh"

namespace slimrt::cuda {
namespace {

constexpr int kWarps = 4, kThreads = kWarps * 32;
constexpr int kPairs = kWarps * 16;
constexpr int kMaxDim = 256;
constexpr int kManyRows = 64, kFewRows = 32;  // of a tile

/// Where a block reads: the same for all its threads, so not in their registers.
struct Sources {
    HeadSource keys, values;
};

/// Tiles [begin, end) of the rows in `rows`.
template <bool exact, int kRows, int kTiles>
__device__ void add_rows(const PrefillJob& job, const Sources& from, Range rows, int begin, int end,
                         PairRow (&own)[2], float& unit, float (&sums)[kTiles][4]) {
    for (int tile = begin; tile < end; ++tile) {
        const int64_t first = rows.first + int64_t(tile) * kRows;
        const int n = static_cast<int>(min(int64_t(kRows), rows.end - first));
        __syncthreads();  // the last tile has been read
        load_tile<exact>(from.keys, first, n, job.k);
        load_tile<exact>(from.values, first, n, job.v);
        commit_copies();
        wait_copies<0>();
        __syncthreads();
        float w[kRows / 8][4] = {}, factor[2];
        score_tile<exact, kRows>(job, w);
        finish_scores<kRows>(job, rows, first, own, w);
        weigh<kRows>(own, w, factor);
        const float of_units = scale_weights<kRows>(job, unit, w);
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) sums[i][j] *= factor[j / 2] * of_units;
        }
        if (job.a.values[0].dim == 8 * kTiles)
            add_values<exact, true, kRows>(job, w, sums);
        else
            add_values<exact, false, kRows>(job, w, sums);
    }
}

template <int kTiles>
__device__ void write_results(const PrefillJob& job, const Parts& parts, int part, PairRow (&own)[2],
                              float unit, const float (&sums)[kTiles][4]) {
    const AttentionView& a = job.a;
    const int member = threadIdx.x % 4, dim = a.values[0].dim;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float sum = own[r].sum;
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const bool exists = pair_of_lane(r) < job.n_pairs;
        const int head = job.head(pair_of_lane(r));
        const int64_t row = job.row + own[r].query;
        const int64_t slot = pair_of(a, blockIdx.z, own[r].query, head) * parts.n + part;
        Share share{0, 0};
        if (exists && member == 0) {
            if (parts.n > 1)
                parts.states[slot] = make_float2(own[r].max, sum);
            else
                share = finish(a, row, head, own[r].max, sum);
        }
        share.keep = __shfl_sync(~0u, share.keep, threadIdx.x % 32 - member);
        share.share = __shfl_sync(~0u, share.share, threadIdx.x % 32 - member) * unit;
        if (!exists) continue;
        float* const out = parts.n > 1 ? parts.values + slot * dim : a.values[0].result(row, head);
        const Share how = parts.n > 1 ? Share{0, unit} : share;
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
            for (int j = 0; j < 2; ++j) {
                const int column = 8 * i + 2 * member + j;
                if (column < dim) write(out + column, how, sums[i][2 * r + j]);
            }
        }
    }
}

/// Blocks: pairs of a sequence (the last, which see most, first), KV heads x parts, sequences.
template <bool exact, int kRows, int kTiles>
__global__ void __launch_bounds__(kThreads, exact || kTiles > 16 ? 2 : 3)
    prefill_kernel(AttentionView a, Parts parts) {
    __shared__ __align__(8) float q_units[kPairs], k_units[kRows], v_units[kRows];  // read two at a time
    __shared__ __align__(8) unsigned char source_bytes[sizeof(Sources)];
    Sources* const sources = reinterpret_cast<Sources*>(source_bytes);
    const PlacedSequence& s = a.sequences[blockIdx.z];
    const int sharing = a.n_heads / a.scores[0].n_heads, part = blockIdx.y % parts.n;
    const int first_pair = int(gridDim.x - 1 - blockIdx.x) * kPairs;
    const int n_pairs = min(kPairs, s.n_queries * sharing - first_pair);
    if (n_pairs <= 0) return;
    constexpr int kCopies = exact ? 2 : 1;
    const int k_stride = tile_stride(a.scores[0].dim), v_stride = tile_stride(a.values[0].dim);
    unsigned char* const q = shared_memory();
    unsigned char* const k = q + kCopies * kPairs * k_stride;
    const PrefillJob job = {a,
                            s,
                            s.query + a.query_shift,
                            int(blockIdx.y) / parts.n,
                            sharing,
                            first_pair,
                            n_pairs,
                            {q, k_stride, kPairs, q_units},
                            {k, k_stride, kRows, k_units},
                            {k + kCopies * kRows * k_stride, v_stride, kRows, v_units}};
    load_queries<exact>(job);
    __syncthreads();
    PairRow own[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        own[r].query = job.query(min(pair_of_lane(r), n_pairs - 1));
        own[r].unit = q_units[pair_of_lane(r)] * a.scale;
    }
    const int64_t first = s.position + job.query(0), last = s.position + job.query(n_pairs - 1);
    const Range stored = stored_rows(a, s, first, last), fresh = fresh_rows(a, s, first, last);
    const int n_stored = static_cast<int>((stored.size() + kRows - 1) / kRows);
    const int64_t n = n_stored + (fresh.size() + kRows - 1) / kRows;
    const int begin = static_cast<int>(n * part / parts.n), end = static_cast<int>(n * (part + 1) / parts.n);
    float sums[kTiles][4] = {}, unit = 0;
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {  // stored rows, fresh rows
        __syncthreads();
        if (threadIdx.x == 0) *sources = {keys_of(job, pass == 1), source_of(job, a.values[0], pass == 1)};
        __syncthreads();
        add_rows<exact, kRows>(job, *sources, pass ? fresh : stored, pass ? max(begin - n_stored, 0) : begin,
                               pass ? end - n_stored : min(end, n_stored), own, unit, sums);
    }
    write_results(job, parts, part, own, unit, sums);
}

size_t shared_bytes(const AttentionArgs& args, int copies, int rows) {
    const int k = tile_stride(args.scores[0].dim), v = tile_stride(args.values[0].dim);
    return size_t(copies) * (kPairs * k + rows * (k + v));
}

template <bool exact, int kRows, int kTiles>
void run(const Device& device, const AttentionArgs& args, const AttentionView& view, std::byte* workspace) {
    const int heads = args.scores[0].n_heads;
    const int tiles = (most_queries(args) * (args.n_heads / heads) + kPairs - 1) / kPairs;
    const int64_t blocks = int64_t(tiles) * heads * int64_t(args.sequences.size());
    constexpr int kBlocksAtOnce = exact || kTiles > 16 ? 2 : 3, kMax = 32;
    const int64_t places = int64_t(device.processors) * kBlocksAtOnce;
    const int n_parts = blocks < places ? parts_for(args, blocks, places, kMax) : 1;
    const Parts parts = place_parts(args, n_parts, workspace);
    launch(device, prefill_kernel<exact, kRows, kTiles>,
           {.grid = dim3(unsigned(tiles), unsigned(heads * n_parts), unsigned(args.sequences.size())),
            .block = dim3(kThreads),
            .shared_bytes = shared_bytes(args, exact ? 2 : 1, kRows)},
           view, parts);
    if (n_parts > 1) merge_parts(device, args, view, parts);
}

template <bool exact, int kRows>
void run_of(const Device& device, const AttentionArgs& args, const AttentionView& view,
            std::byte* workspace) {
    const int dim = args.values[0].dim;
    if (dim <= 64) return run<exact, kRows, 8>(device, args, view, workspace);
    if (dim <= 128) return run<exact, kRows, 16>(device, args, view, workspace);
    run<exact, kFewRows, 32>(device, args, view, workspace);
}

bool is_exact(const AttentionArgs& args) {
    return args.scores[0].stored.dtype == DType::F32 || args.values[0].stored.dtype == DType::F32;
}

/// Of a tile, as run_of() has them.
int rows_of(const AttentionArgs& args) {
    return is_exact(args) || args.values[0].dim > 128 ? kFewRows : kManyRows;
}

bool aligned(const void* p, size_t stride) {
    return reinterpret_cast<uintptr_t>(p) % 16 == 0 && stride % 16 == 0;
}

template <class Term>
bool can_read(const Term& term) {
    const Rows& rows = term.stored;
    if (term.dim % 8 || term.dim > kMaxDim) return false;
    if (term.fresh && !aligned(term.fresh.data, term.fresh.stride)) return false;
    if (rows.block_tokens == 0)
        return is_float(rows.dtype) && (!rows.base || aligned(rows.base, rows.row_bytes));
    const bool own = rows.heads == term.n_heads && rows.head_dim() == term.dim;
    const bool side_by_side = rows.heads == 1 && rows.width % 8 == 0;  // eight columns are read at once
    return aligned(rows.base, rows.block_stride) && (own || side_by_side);
}

}  // namespace

bool prefill_can(const Device& device, const AttentionArgs& args) {
    if (args.scores.size() != 1 || args.values.size() != 1) return false;
    const ScoreTerm& score = args.scores[0];
    if (score.n_heads % args.values[0].n_heads || !can_read(score) || !can_read(args.values[0])) return false;
    const int n_rot = score.rope ? score.rope.n_rot : 0;
    if (n_rot % (score.rope.interleaved ? 8 : 16)) return false;
    return shared_bytes(args, is_exact(args) ? 2 : 1, rows_of(args)) + 2048 <= device.shared_bytes;
}

void attention_prefill(const Device& device, const AttentionArgs& args, const AttentionView& view,
                       std::byte* workspace) {
    if (is_exact(args)) return run_of<true, kFewRows>(device, args, view, workspace);
    run_of<false, kManyRows>(device, args, view, workspace);
}

}  // namespace slimrt::cuda
