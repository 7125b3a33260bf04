// Decode attention: one query a sequence, over planes with heads of their own (modes kv, kivi ...).
//
// A block has the up to 8 queries that share a head of K and V, and a part of the rows (split-K over the
// context). Each of its warps takes every n-th tile of 32 rows: K and V are copied asynchronously to shared
// memory, K of the next tile while V is read. Both products are mma of 16 x 8 x 16 whose 16 rows are 8
// queries (then their weights) as two 16-bit numbers each, so that nothing is lost but the rounding of the
// rows, and a row's byte costs a fraction of an instruction. The warps' sums are combined in shared memory,
// the parts' in merge_parts(). The launch does not depend on lengths.
#include <algorithm>
#include <type_traits>

#include "kernels/cuda/attention_decode.cuh"

namespace slimrt::cuda {
namespace {

constexpr int kMaxWarps = 4;

/// The visible rows of a tile, of those in `rows`.
__device__ VisibleRows visible_of(int64_t tile, Range rows) {
    const int64_t first = tile * kBlockRows;
    return {static_cast<int>(max(rows.first - first, int64_t(0))),
            static_cast<int>(min(rows.end - first, int64_t(kBlockRows)))};
}

/// The tiles that a warp takes, every n-th of the part's, and their copies.
struct WarpTiles {
    const DecodeJob& job;
    Range rows;
    int64_t tile, end;
    int step;
    int32_t block, next;  // cache blocks of this tile and of the next

    __device__ WarpTiles(const DecodeJob& job, Range rows, int64_t begin, int64_t end)
        : job(job), rows(rows), tile(begin + threadIdx.x / 32), end(end), step(blockDim.x / 32) {
        block = block_of(tile);
        next = block_of(tile + step);
    }
    __device__ int32_t block_of(int64_t tile) const {
        return job.s.table && tile < end ? job.s.table[tile] : 0;
    }
    __device__ void fetch_k(int64_t tile, int32_t block) const {
        if (tile < end) fetch(job.shape.k, block, tile, job.kv_head, visible_of(tile, rows), job.tiles);
        commit_copies();
    }
    __device__ void fetch_v(int64_t tile, int32_t block) const {
        unsigned char* const to = job.tiles + job.shape.k.bytes;
        if (tile < end) fetch(job.shape.v, block, tile, job.value_head, visible_of(tile, rows), to);
        commit_copies();
    }
};

template <bool rotated, int kTiles>
__device__ void add_stored(const DecodeJob& job, WarpTiles& at, Sums& state, float (&sums)[kTiles][4]) {
    const float threshold = job.a.sparse_threshold;
    const bool spares = threshold > 0;
    const int query = threadIdx.x % 32 / 4;
    unsigned long long met = 0, skipped = 0;
    int32_t after;
    for (; at.tile < at.end; at.tile += at.step, at.block = at.next, at.next = after) {
        after = at.block_of(at.tile + 2 * at.step);  // known long before it is needed
        if (spares)
            wait_copies<0>();
        else
            wait_copies<1>();
        __syncwarp();
        const VisibleRows visible = visible_of(at.tile, at.rows);
        float w[4][2], mass;
        score_tile<rotated>(job, at.tile * kBlockRows, visible, w);
        __syncwarp();
        if (!spares) at.fetch_k(at.tile + at.step, at.next);
        const float factor = online_softmax(w, state, mass);
        bool needed = true;
        if (spares) {
            const bool negligible = state.skipped + mass <= threshold * state.sum;
            needed = __any_sync(~0u, !negligible && query < job.n_queries);
            met += visible.end - visible.first;
            if (needed)
                at.fetch_v(at.tile, at.block);
            else
                skipped += visible.end - visible.first;
            at.fetch_k(at.tile + at.step, at.next);
        }
        if (needed) {
            wait_copies<1>();
            __syncwarp();
            add_tile(job, visible, factor, w, state, sums);
            __syncwarp();
        } else {
            state.skipped += mass;
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[n][i] *= factor;
            }
        }
        if (!spares) at.fetch_v(at.tile + at.step, at.next);
    }
    wait_copies<0>();
    if (spares && job.a.counts && threadIdx.x % 32 == 0 && met > 0) {
        auto* const counts = reinterpret_cast<unsigned long long*>(job.a.counts);
        atomicAdd(counts, met);
        atomicAdd(counts + 1, skipped);
    }
}

/// Maxima and sums of weights of the warps.
struct Shared {
    float max[kMaxWarps + 1][kQueries], sum[kMaxWarps + 1][kQueries];  // the last: the fresh row
    float weights[kMaxWarps + 1][kQueries];
    MergeFactors shares[kQueries];
};

/// The fresh row's score, in the part that reads it.
template <bool rotated>
__device__ void score_fresh(const DecodeJob& job, bool wanted, Shared& shared) {
    const int lane = threadIdx.x % 32, dim = job.scores().dim;
    const bool sees = wanted && fresh_rows(job.a, job.s, job.s.position, job.s.position).size() > 0;
#pragma unroll 1
    for (int i = threadIdx.x / 32; i < job.n_queries; i += blockDim.x / 32) {
        float dot = 0;
        if (sees) {
            const float* const row = job.scores().fresh.row(job.row) + int64_t(job.kv_head) * dim;
            const float *const q = job.query(i), *const rope_row =
                                                     job.scores().rope_table.row(job.s.position);
            const int half = rotated ? dim / 2 : 0;
            for (int column = lane; column < half; column += 32) {
                const float cos = rope_row[2 * column], sin = rope_row[2 * column + 1];
                const float x = row[column], y = row[column + half];
                dot = fmaf(q[column], x * cos - y * sin, dot);
                dot = fmaf(q[column + half], x * sin + y * cos, dot);
            }
            for (int column = 2 * half + lane; column < dim; column += 32)
                dot = fmaf(q[column], row[column], dot);
        }
        for (int lanes = 16; lanes > 0; lanes /= 2) dot += __shfl_xor_sync(~0u, dot, lanes);
        const float score = job.finish(i, dot, job.a.scale, sees, job.s.position);
        if (lane == 0) {
            shared.max[kMaxWarps][i] = score;
            shared.sum[kMaxWarps][i] = sees ? (score == score ? 1.0f : score) : 0.0f;
        }
    }
}

/// Weights by which the warps' sums and the fresh row are merged; a thread a query.
__device__ void combine(const DecodeJob& job, const Parts& parts, int64_t slot, int i, Shared& shared) {
    float high = -infinity(), sum = 0;
    const auto each = [&](auto f) {
#pragma unroll 1
        for (int w = 0; w <= kMaxWarps; ++w) {
            if (w == kMaxWarps || w < static_cast<int>(blockDim.x / 32)) f(w);
        }
    };
    each([&](int w) { high = fmaxf(high, shared.max[w][i]); });
    each([&](int w) {
        const float of_warp = shared.sum[w][i];
        const float weight = of_warp == 0 ? 0.0f : exp2f(shared.max[w][i] - reference(high));
        shared.weights[w][i] = weight;
        if (of_warp != 0) sum += weight * of_warp;
    });
    if (parts.n > 1)
        parts.states[slot] = make_float2(high, sum);
    else
        shared.shares[i] = finish(job.a, job.row, job.first_head + i, high, sum);
}

/// values: the warps' sums [warp][query][dim].
__device__ void write_results(const DecodeJob& job, const Parts& parts, int part, const float* values,
                              Shared& shared) {
    const int dim = job.values().dim, n_warps = blockDim.x / 32;
    const int64_t first = int64_t(job.value_head) * dim;  // of a fresh row
    const auto slot = [&](int i) {
        return pair_of(job.a, blockIdx.z, 0, job.first_head + i) * parts.n + part;
    };
    if (const int i = threadIdx.x; i < job.n_queries) combine(job, parts, slot(i), i, shared);
    __syncthreads();
#pragma unroll 1
    for (int at = threadIdx.x; at < job.n_queries * dim; at += blockDim.x) {
        const int i = at / dim, column = at % dim;
        float sum = 0;
#pragma unroll
        for (int w = 0; w < kMaxWarps; ++w) {
            const float weight = w < n_warps ? shared.weights[w][i] : 0.0f;
            if (weight != 0) sum = fmaf(weight, values[(w * kQueries + i) * dim + column], sum);
        }
        const float weight = shared.weights[kMaxWarps][i];
        if (weight != 0) sum = fmaf(weight, job.values().fresh.row(job.row)[first + column], sum);
        if (parts.n > 1)
            parts.values[slot(i) * dim + column] = sum;
        else
            write(job.values().result(job.row, job.first_head + i) + column, shared.shares[i], sum);
    }
}

/// K and V are stored in different types.
struct MixedRows {
    static constexpr int kGroup = 32;  // there may be groups
};

/// Makes the type of both planes a constant, so that a kernel has code for it alone: code for all types is
/// too large for the instruction cache, and a layer's weights would evict it from L2.
template <class Row>
__device__ inline void know_type(DecodeShape& shape) {
    if constexpr (!std::is_same_v<Row, MixedRows>) {
        shape.k.rows.dtype = shape.v.rows.dtype = Row::kType;
        shape.k.reading = shape.v.reading = reading_of(Row::kType);
    }
}

/// Blocks: parts, groups of queries of a KV head, sequences.
template <class Row, bool rotated, int kTiles>
__global__ void __launch_bounds__(kMaxWarps * 32)
    decode_kernel(AttentionView a, DecodeShape shape, Parts parts) {
    begin_early();
    know_type<Row>(shape);
    __shared__ Shared shared;
    __shared__ float units[kQueries];
    const PlacedSequence& s = a.sequences[blockIdx.z];
    const int sharing = a.n_heads / a.scores[0].n_heads;
    const int kv_head = blockIdx.y / shape.query_groups, group = blockIdx.y % shape.query_groups;
    const int first_head = kv_head * sharing + group * kQueries;
    const int part = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int dim = a.values[0].dim;
    unsigned char* const tiles = shared_memory();
    const DecodeJob job = {a,
                           shape,
                           s,
                           s.query + a.query_shift,
                           kv_head,
                           first_head / (a.n_heads / a.values[0].n_heads),
                           first_head,
                           min(kQueries, sharing - group * kQueries),
                           reinterpret_cast<uint4*>(tiles + blockDim.x / 32 * shape.warp_bytes),
                           units,
                           tiles + warp * shape.warp_bytes};
    const Range rows = stored_rows(a, s, s.position, s.position);
    const uint32_t first = static_cast<uint32_t>(rows.first / kBlockRows);
    const uint32_t n =
        rows.size() ? static_cast<uint32_t>((rows.end + kBlockRows - 1) / kBlockRows) - first : 0;
    WarpTiles at(job, rows, first + n * part / parts.n, first + n * (part + 1) / parts.n);
    at.fetch_k(at.tile, at.block);
    if (!(a.sparse_threshold > 0)) at.fetch_v(at.tile, at.block);
    place_queries<rotated>(job);
    score_fresh<rotated>(job, part == parts.n - 1, shared);
    __syncthreads();

    Sums state;
    float sums[kTiles][4] = {};
    add_stored<rotated>(job, at, state, sums);

    if (lane % 4 == 0) {
        shared.max[warp][lane / 4] = state.max;
        shared.sum[warp][lane / 4] = state.sum;
    }
    __syncthreads();
    float* const values = reinterpret_cast<float*>(tiles);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int column = value_column(shape.v.reading, i, lane % 4 * 2 + j);
            if (column < dim)
                values[(warp * kQueries + lane / 4) * dim + column] =
                    (sums[i][j] + sums[i][j + 2]) * state.unit;
        }
    }
    __syncthreads();
    write_results(job, parts, part, values, shared);
}

template <class Row, bool rotated, int kTiles>
void run(const Device& device, const AttentionArgs& args, const AttentionView& view, DecodeShape shape,
         std::byte* workspace) {
    const ScoreTerm& score = args.scores[0];
    const int steps = score.dim / 16, sums = kQueries * args.values[0].dim * int(sizeof(float));
    shape.warp_bytes = std::max(shape.k.bytes + shape.v.bytes, sums);
    const size_t rotation_bytes = rotated ? TileRotations::bytes(score.dim) : 0;
    const size_t queries = steps * 32 * sizeof(uint4) + rotation_bytes;
    const size_t most = device.shared_bytes - sizeof(Shared) - 1024;
    int warps = kMaxWarps;
    while (warps > 1 && warps * shape.warp_bytes + queries > most) warps /= 2;
    const size_t shared = warps * shape.warp_bytes + queries;

    constexpr int kMaxAtOnce = kTiles == 8                ? 4 - rotated
                               : kTiles == 16 && !rotated ? 3
                                                          : 2;  // by their registers
    const int at_once =
        std::clamp<int>(static_cast<int>(device.shared_bytes / (shared + 2048)), 1, kMaxAtOnce);
    const int groups = score.n_heads * shape.query_groups;
    constexpr int kMax = 128;
    const int n_parts = parts_for(args, int64_t(groups) * int64_t(args.sequences.size()),
                                  int64_t(device.processors) * at_once, kMax);
    const Parts parts = place_parts(args, n_parts, workspace);
    launch(device, decode_kernel<Row, rotated, kTiles>,
           {.grid = dim3(unsigned(n_parts), unsigned(groups), unsigned(args.sequences.size())),
            .block = dim3(unsigned(warps * 32)),
            .shared_bytes = shared,
            .early = true},
           view, shape, parts);
    if (n_parts > 1) merge_parts(device, args, view, parts);
}

template <class Row, bool rotated>
void run_of(const Device& device, const AttentionArgs& args, const AttentionView& view,
            const DecodeShape& shape, std::byte* workspace) {
    const int dim = args.values[0].dim;
    if (dim <= 64) return run<Row, rotated, 8>(device, args, view, shape, workspace);
    if (dim <= 128) return run<Row, rotated, 16>(device, args, view, shape, workspace);
    run<Row, rotated, 32>(device, args, view, shape, workspace);
}

/// fn(the trait of both planes' type), or fn(MixedRows()).
template <class Fn>
void with_rows_of(DType k, DType v, const Fn& fn) {
    if (k == v)
        with_row_type(k, fn);
    else
        fn(MixedRows());
}

/// Whether RoPE on read is possible.
bool can_rotate(const ScoreTerm& score) {
    const Rope& rope = score.rope;
    return has_groups(score.stored.dtype) && rope.n_rot == score.dim && !rope.interleaved &&
           score.dim % 64 == 0 && rope.table.rows >= kBlockRows;
}

}  // namespace

bool decode_can(const Device& device, const AttentionArgs& args) {
    if (args.scores.size() != 1 || args.values.size() != 1) return false;
    const ScoreTerm& score = args.scores[0];
    const ValueTerm& value = args.values[0];
    if (score.row_scale || score.bias || score.n_heads % value.n_heads) return false;
    if (score.rope && !can_rotate(score)) return false;
    for (const AttentionSequence& s : args.sequences) {
        if (s.n_queries != 1) return false;
    }
    if (!can_fetch(score.stored, score.n_heads, score.dim) ||
        !can_fetch(value.stored, value.n_heads, value.dim) || value.stored.scale_tokens)
        return false;
    const int warp = plane_of(score.stored, score.dim).bytes + plane_of(value.stored, value.dim).bytes;
    const int rotation_bytes = score.rope ? TileRotations::bytes(score.dim) : 0;
    return size_t(warp) + rotation_bytes + (16 << 10) <= device.shared_bytes;
}

void attention_decode(const Device& device, const AttentionArgs& args, const AttentionView& view,
                      std::byte* workspace) {
    const ScoreTerm& score = args.scores[0];
    const ValueTerm& value = args.values[0];
    DecodeShape shape{plane_of(score.stored, score.dim), plane_of(value.stored, value.dim), 1, 0};
    shape.query_groups = (args.n_heads / score.n_heads + kQueries - 1) / kQueries;
    with_rows_of(score.stored.dtype, value.stored.dtype, [&]<class Row>(Row) {
        if constexpr (Row::kGroup > 0) {
            if (score.rope) return run_of<Row, true>(device, args, view, shape, workspace);
        }
        if constexpr (!std::is_same_v<Row, RowF32>)  // decode_can() has refused them
            run_of<Row, false>(device, args, view, shape, workspace);
    });
}

}  // namespace slimrt::cuda
