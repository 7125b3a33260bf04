// Prefill attention: many queries a sequence, over planes with heads of their own: prompts, encoders, few
// queries too.
//
// A block has 64 (query, head) pairs of one head of K (V may have fewer heads), a warp 16 of them. It takes
// the rows that they see 64 at a time (fewer where heads are wide), as tiles of 16-bit numbers in shared
// memory. Products are mma of 16 x 8 x 16; softmax weights stay in registers, laid out by the first product
// as the second one reads them. F32 rows, and with them queries and weights, become two f16 numbers each:
// three products in place of one, as exact as float32 to a few units in the last place.
#include <algorithm>

#include "kernels/cuda/attention_prefill.cuh"

namespace slimrt::cuda {
namespace {

constexpr int kThreads = kTileThreads;
constexpr int kPairs = kThreads / 32 * 16;
constexpr int kMaxDim = 256;
constexpr int kManyRows = 64, kFewRows = 32;  // rows of a tile

/// Adds tiles [begin, end) of `rows`; from: keys and values. copied: tiles are copies of the rows as stored;
/// values are copied while scores are computed, and the next keys while values are added.
template <bool exact, bool copied, int kRows, int kTiles>
__device__ void add_rows(const PrefillJob& job, const HeadSource* from, Range rows, int begin, int end,
                         PairRow (&own)[2], float& unit, float (&sums)[kTiles][4]) {
    const auto count = [&](int tile) {
        return static_cast<int>(min(rows.size() - int64_t(tile) * kRows, int64_t(kRows)));
    };
    const auto copy = [&](int which, int tile, const F16Tile& to) {
        copy_tile<exact>(from[which], rows.first + int64_t(tile) * kRows, count(tile), to);
        commit_copies();
    };
    set_visible_rows(job, rows, own);
    if (copied && begin < end) copy(0, begin, job.k);
#pragma unroll 1
    for (int tile = begin; tile < end; ++tile) {
        wait_copies<0>();
        __syncthreads();  // keys have arrived, and all have read the last tile
        if constexpr (copied) {
            copy(1, tile, job.v);
        } else {
#pragma unroll 1
            for (int i = 0; i < 2; ++i) {  // one piece of code for both
                const F16Tile to{i ? job.v.data : job.k.data, i ? job.v.stride : job.k.stride, kRows};
                load_tile<exact>(from[i], rows.first + int64_t(tile) * kRows, count(tile), to);
            }
            commit_copies();
            wait_copies<0>();
            __syncthreads();
        }
        float w[kRows / 8][4], factor[2];
        score_tile<exact, kRows>(job, w);
        finish_scores<kRows>(job, rows.first, tile * kRows, own, w);
        if constexpr (copied) {
            wait_copies<0>();
            __syncthreads();
            if (tile + 1 < end) copy(0, tile + 1, job.k);
        }
        online_softmax<kRows>(own, w, factor);
        const float of_units = scale_weights<kRows>(job, unit, w);
        scale_sums(factor, of_units, sums);
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
    const bool merges = a.merge && parts.n == 1;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float sum = own[r].sum;
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const bool exists = pair_of_lane(r) < job.n_pairs;
        const int head = job.head(pair_of_lane(r));
        const int64_t row = job.row + own[r].query;
        const int64_t slot = pair_of(a, blockIdx.z, own[r].query, head) * parts.n + part;
        MergeFactors share{0, 0};
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
        const MergeFactors how = parts.n > 1 ? MergeFactors{0, unit} : share;
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
            if (8 * i >= dim) break;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float* const to = out + 8 * i + 2 * member + j;
                const float value = sums[i][2 * r + j];
                if (merges)
                    write(to, how, value);
                else
                    *to = how.share == 0 ? 0 : how.share * value;  // without a branch
            }
        }
    }
}

/// Where keys and values come from.
template <bool exact>
__device__ void set_sources(const PrefillJob& job, const Packed& packed, bool fresh, HeadSource* to) {
    const ScoreView& score = job.a.scores[0];
    const ValueView& value = job.a.values[0];
    const int k_head = job.kv_head, v_head = job.head_of(value);
    if (fresh) {
        to[0] = packed.k.source<exact>(k_head, score.dim, job.row, job.s.position);
        to[1] = packed.v.source<exact>(v_head, value.dim, job.row, job.s.position);
    } else {
        to[0] = keys_of(score, score.stored, score.factors, job.s.table, k_head);
        to[1] = source_of(value, value.stored, job.s.table, v_head);
    }
}

/// Blocks: KV heads x parts, pairs of a sequence (the last ones, which see most rows, first), sequences.
template <bool exact, int kRows, int kTiles>
__global__ void __launch_bounds__(kThreads, exact || kTiles > 16 ? 2 : 3)
    prefill_kernel(const __grid_constant__ AttentionView a, Packed packed, Parts parts) {
    __shared__ __align__(8) unsigned char source_bytes[2 * sizeof(HeadSource)];  // to save registers
    HeadSource* const sources = reinterpret_cast<HeadSource*>(source_bytes);
    const PlacedSequence& s = a.sequences[blockIdx.z];
    const int sharing = a.n_heads / a.scores[0].n_heads, part = blockIdx.x % parts.n;
    const int first_pair = int(gridDim.y - 1 - blockIdx.y) * kPairs;
    const int n_pairs = min(kPairs, s.n_queries * sharing - first_pair);
    if (n_pairs <= 0) return;
    constexpr int kCopies = exact ? 2 : 1;
    const int k_stride = tile_stride(a.scores[0].dim), v_stride = tile_stride(a.values[0].dim);
    unsigned char* const q = shared_memory();
    unsigned char* const k = q + kCopies * kPairs * k_stride;
    const PrefillJob job = {a,
                            s,
                            s.query + a.query_shift,
                            int(blockIdx.x) / parts.n,
                            sharing,
                            first_pair,
                            n_pairs,
                            {q, k_stride, kPairs},
                            {k, k_stride, kRows},
                            {k + kCopies * kRows * k_stride, v_stride, kRows}};
    load_queries<exact>(job);
    __syncthreads();
    PairRow own[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        own[r].query = job.query(min(pair_of_lane(r), n_pairs - 1));
        own[r].unit = job.q.unit(pair_of_lane(r)) * a.scale;
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
        if (threadIdx.x == 0) set_sources<exact>(job, packed, pass == 1, sources);
        __syncthreads();
        const Range rows = pass ? fresh : stored;
        const int from = pass ? max(begin - n_stored, 0) : begin;
        const int to = pass ? end - n_stored : min(end, n_stored);
        if (sources[0].copies(exact) && sources[1].copies(exact))
            add_rows<exact, true, kRows>(job, sources, rows, from, to, own, unit, sums);
        else
            add_rows<exact, false, kRows>(job, sources, rows, from, to, own, unit, sums);
    }
    write_results(job, parts, part, own, unit, sums);
}

size_t shared_bytes(const AttentionArgs& args, int copies, int rows) {
    const int k = tile_stride(args.scores[0].dim), v = tile_stride(args.values[0].dim);
    return size_t(copies) * (kPairs * k + rows * (k + v));
}

bool is_exact(const AttentionArgs& args) {
    return args.scores[0].stored.dtype == DType::F32 || args.values[0].stored.dtype == DType::F32;
}

template <class Term>
PackedRows place_rows(const Term& term, std::byte* at) {
    return {reinterpret_cast<unsigned char*>(at), int(term.fresh.rows), tile_stride(term.dim)};
}

template <class Term>
size_t packed_bytes(const AttentionArgs& args, const Term& term) {
    return size_t(term.fresh.rows) * term.n_heads * (is_exact(args) ? 2 : 1) * tile_stride(term.dim);
}
size_t packed_bytes(const AttentionArgs& args) {
    return packed_bytes(args, args.scores[0]) + packed_bytes(args, args.values[0]);
}

template <bool exact>
Packed pack(const Device& device, const AttentionArgs& args, const AttentionView& view,
            std::byte* workspace) {
    constexpr int kRowsAtOnce = 8;
    const ScoreTerm& k = args.scores[0];
    const ValueTerm& v = args.values[0];
    const Packed to{place_rows(k, workspace), place_rows(v, workspace + packed_bytes(args, k))};
    const auto has_fresh = [](const AttentionSequence& s) { return s.fresh; };
    if (!std::ranges::any_of(args.sequences, has_fresh)) return to;
    const int blocks = (most_queries(args) + kRowsAtOnce - 1) / kRowsAtOnce;
    launch(device, pack_kernel<exact>,
           {.grid = dim3(unsigned(blocks), unsigned(k.n_heads + v.n_heads), unsigned(args.sequences.size())),
            .block = dim3(kThreads)},
           view, to);
    return to;
}

template <bool exact, int kRows, int kTiles>
void run(const Device& device, const AttentionArgs& args, const AttentionView& view, std::byte* workspace) {
    const Packed packed = pack<exact>(device, args, view, workspace);
    const int heads = args.scores[0].n_heads;
    const int tiles = (most_queries(args) * (args.n_heads / heads) + kPairs - 1) / kPairs;
    const int64_t blocks = int64_t(tiles) * heads * int64_t(args.sequences.size());
    constexpr int kBlocksAtOnce = exact || kTiles > 16 ? 2 : 3, kMax = 32;
    const int64_t places = int64_t(device.processors) * kBlocksAtOnce;
    const int n_parts = blocks < places ? parts_for(args, blocks, places, kMax) : 1;
    const Parts parts = place_parts(args, n_parts, workspace + packed_bytes(args));
    launch(device, prefill_kernel<exact, kRows, kTiles>,
           {.grid = dim3(unsigned(heads * n_parts), unsigned(tiles), unsigned(args.sequences.size())),
            .block = dim3(kThreads),
            .shared_bytes = shared_bytes(args, exact ? 2 : 1, kRows)},
           view, packed, parts);
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

/// Rows of a tile, as run_of() chooses them.
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
    const bool side_by_side = rows.heads == 1 && rows.width % 8 == 0;  // eight columns are read at a time
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

size_t prefill_workspace(const AttentionArgs& args) { return packed_bytes(args) + kMaxPartBytes; }

void attention_prefill(const Device& device, const AttentionArgs& args, const AttentionView& view,
                       std::byte* workspace) {
    if (is_exact(args)) return run_of<true, kFewRows>(device, args, view, workspace);
    run_of<false, kManyRows>(device, args, view, workspace);
}

}  // namespace slimrt::cuda
