// Attention of many queries a sequence over planes of their own heads: prompts, encoders, few queries too.
//
// A block has 64 (query, head) pairs of one head of K and V, a warp 16 of them; it goes through the rows they
// see, 64 at a time (fewer where they are wide), as tiles of 16-bit numbers in shared memory. Products are
// mma of 16 x 8 x 16; softmax weights stay in registers, where the first product leaves them as the second
// one wants them. F32 rows become two f16 numbers each, and so do queries and weights: three products instead
// of one, as exact as float32 to a few units.
#include <algorithm>

#include "kernels/cuda/attention_tile.cuh"

namespace slimrt::cuda {
namespace {

constexpr int kWarps = 4, kThreads = kWarps * 32;
constexpr int kPairs = kWarps * 16;
constexpr int kMostDim = 256;

/// What a block works on.
struct Job {
    const AttentionView& a;
    const PlacedSequence& s;
    int64_t row;  // of the sequence's first query
    int kv_head, sharing;
    int first_pair, n_pairs;
    Tile q, k, v;

    __device__ int query(int pair) const { return (first_pair + pair) / sharing; }
    __device__ int head(int pair) const { return kv_head * sharing + (first_pair + pair) % sharing; }
};

/// A plane's head: where stored heads are not those of the term, a row has one.
template <class Term>
__device__ HeadSource source_of(const Job& job, const Term& term, bool fresh) {
    HeadSource from{};
    from.rows = fresh ? fresh_view(term.fresh, job.row, job.s.position) : term.stored;
    from.table = job.s.table;
    from.dim = term.dim;
    const bool side_by_side = from.rows.head_dim != term.dim || from.rows.block_tokens == 0;
    from.head = side_by_side ? 0 : job.kv_head;
    from.first = side_by_side ? job.kv_head * term.dim : 0;
    return from;
}
__device__ HeadSource keys_of(const Job& job, bool fresh) {
    const ScoreView& term = job.a.scores[0];
    HeadSource from = source_of(job, term, fresh);
    const int column = job.kv_head * term.dim;
    from.row_scale = term.row_scale ? term.row_scale + column : nullptr;
    from.bias = term.bias ? term.bias + column : nullptr;
    if (term.fresh_factors.data)
        from.factors = fresh ? fresh_view(term.fresh_factors, job.row, job.s.position) : term.factors;
    from.turns = term.turns;
    from.n_rot = term.n_rot;
    from.interleaved = term.interleaved;
    return from;
}

template <bool exact>
__device__ void load_queries(const Job& job) {
    const ScoreView& term = job.a.scores[0];
    fill_tile<exact>(job.q, term.dim, [&](int pair, int column, float(&x)[8]) {
        if (pair >= job.n_pairs) return;
        const float* const from =
            term.q.row(job.row + job.query(pair)) + int64_t(job.head(pair)) * term.q_columns + column;
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = from[i];
    });
}

/// One of the two pairs of a lane: rows lane / 4 and lane / 4 + 8 of its warp's 16.
struct Row {
    int query;
    float unit;  // of its scores
    float max = -infinity(), sum = 0;
};

__device__ int pair_of_lane(int r) { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r; }

/// Scores of this warp's 16 pairs and a tile's rows.
template <bool exact, int kRows>
__device__ void score_tile(const Job& job, float (&s)[kRows / 8][4]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const unsigned char* const q = job.q.at(warp * 16 + lane % 16, lane / 16 * 8);
    const unsigned char* const k = job.k.at(lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8);
    const int steps = padded(job.a.scores[0].dim) / 16;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        uint32_t a[4], a_rest[4], b[4], b_rest[4];
        load_matrices(a, q + step * 32);
        if constexpr (exact) load_matrices(a_rest, q + job.q.rest() + step * 32);
#pragma unroll
        for (int i = 0; i < kRows / 8; i += 2) {
            const unsigned char* const at = k + i * 8 * job.k.stride + step * 32;
            load_matrices(b, at);
            if constexpr (exact) {
                load_matrices(b_rest, at + job.k.rest());
                multiply_add_f16(s[i], a, b_rest[0], b_rest[1]);
                multiply_add_f16(s[i + 1], a, b_rest[2], b_rest[3]);
                multiply_add_f16(s[i], a_rest, b[0], b[1]);
                multiply_add_f16(s[i + 1], a_rest, b[2], b[3]);
            }
            multiply_add_f16(s[i], a, b[0], b[1]);
            multiply_add_f16(s[i + 1], a, b[2], b[3]);
        }
    }
}

/// Scores of tile rows at positions from `first` on, in units of what they are, and unseen ones: -inf.
template <int kRows>
__device__ void finish_scores(const Job& job, const Range& rows, int64_t first, const Row (&own)[2],
                              float (&s)[kRows / 8][4]) {
    const int member = threadIdx.x % 4;
    int begin[2], end[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int64_t position = job.s.position + own[r].query;
        const Range range = seen(job.a, job.s, rows, position, position);
        begin[r] = static_cast<int>(min(max(range.first - first, int64_t(0)), int64_t(kRows)));
        end[r] = static_cast<int>(max(min(range.end - first, int64_t(kRows)), int64_t(0)));
    }
    const bool all = begin[0] == 0 && begin[1] == 0 && end[0] == kRows && end[1] == kRows;
    const bool masks = __any_sync(~0u, !all);
#pragma unroll
    for (int i = 0; i < kRows / 8; ++i) {
        const float2 units = *reinterpret_cast<const float2*>(job.k.units + 8 * i + 2 * member);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int r = j / 2, at = 8 * i + 2 * member + j % 2;
            float x = s[i][j] * (own[r].unit * (j % 2 ? units.y : units.x));
            const bool sees = !masks || (at >= begin[r] && at < end[r]);
            if (job.a.relative_bias.data && sees && pair_of_lane(r) < job.n_pairs) {
                const int64_t distance = first + at - (job.s.position + own[r].query);
                const float* const of_head = job.a.relative_bias.row(job.head(pair_of_lane(r)));
                x += of_head[job.a.relative_origin + distance] * kLog2E;
            }
            s[i][j] = sees ? x : -infinity();
        }
    }
}

/// Scores to weights; factor: what earlier sums are multiplied with.
template <int kRows>
__device__ void weigh(Row (&own)[2], float (&s)[kRows / 8][4], float (&factor)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float high = own[r].max;
#pragma unroll
        for (int i = 0; i < kRows / 8; ++i) high = fmaxf(high, fmaxf(s[i][2 * r], s[i][2 * r + 1]));
        high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
        high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
        const float zero = reference(high);
        factor[r] = power_of_two(own[r].max - zero);
        own[r].max = high;
        own[r].sum *= factor[r];
#pragma unroll
        for (int i = 0; i < kRows / 8; ++i) {
#pragma unroll
            for (int j = 2 * r; j < 2 * r + 2; ++j) {
                s[i][j] = power_of_two(s[i][j] - zero);
                own[r].sum += s[i][j];  // of this lane's rows
            }
        }
    }
}

/// Weights times the units of the tile's rows, in the largest so far; returns the factor of earlier sums.
template <int kRows>
__device__ float scale_weights(const Job& job, float& unit, float (&w)[kRows / 8][4]) {
    const int lane = threadIdx.x % 32;
    float most = unit;
    for (int row = lane; row < kRows; row += 32) most = fmaxf(most, job.v.units[row]);
    for (int lanes = 16; lanes > 0; lanes /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, lanes));
    const float factor = unit / most, shrink = 1 / most;
    unit = most;
#pragma unroll
    for (int i = 0; i < kRows / 8; ++i) {
        const float2 units = *reinterpret_cast<const float2*>(job.v.units + 8 * i + 2 * (lane % 4));
#pragma unroll
        for (int j = 0; j < 4; ++j) w[i][j] *= (j % 2 ? units.y : units.x) * shrink;
    }
    return factor;
}

/// sums += weights times the tile's rows.
template <bool exact, int kRows, int kTiles>
__device__ void add_values(const Job& job, const float (&w)[kRows / 8][4], float (&sums)[kTiles][4]) {
    const int lane = threadIdx.x % 32, columns = job.a.values[0].dim;
    const unsigned char* const v = job.v.at(lane % 16, lane / 16 * 8);
#pragma unroll
    for (int i = 0; i < kRows / 8; i += 2) {
        uint32_t a[4], a_rest[4], b[4], b_rest[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const float x = w[i + k / 2][k % 2 * 2], y = w[i + k / 2][k % 2 * 2 + 1];
            a[k] = pair_f16(x, y);
            if constexpr (exact) a_rest[k] = rest_of_pair(x, y, a[k]);
        }
#pragma unroll
        for (int n = 0; n < kTiles; n += 2) {
            if (8 * n >= columns) break;
            const unsigned char* const at = v + i * 8 * job.v.stride + n * 16;
            load_matrices_turned(b, at);
            if constexpr (exact) {
                load_matrices_turned(b_rest, at + job.v.rest());
                multiply_add_f16(sums[n], a, b_rest[0], b_rest[1]);
                multiply_add_f16(sums[n + 1], a, b_rest[2], b_rest[3]);
                multiply_add_f16(sums[n], a_rest, b[0], b[1]);
                multiply_add_f16(sums[n + 1], a_rest, b[2], b[3]);
            }
            multiply_add_f16(sums[n], a, b[0], b[1]);
            multiply_add_f16(sums[n + 1], a, b[2], b[3]);
        }
    }
}

/// Where a block reads: the same for all its threads, so not in their registers.
struct Sources {
    HeadSource keys, values;
};

/// Tiles [begin, end) of the rows in `rows`.
template <bool exact, int kRows, int kTiles>
__device__ void add_rows(const Job& job, const Sources& from, Range rows, int begin, int end, Row (&own)[2],
                         float& unit, float (&sums)[kTiles][4]) {
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
        add_values<exact, kRows>(job, w, sums);
    }
}

template <int kTiles>
__device__ void write_results(const Job& job, const Parts& parts, int part, Row (&own)[2], float unit,
                              const float (&sums)[kTiles][4]) {
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
        float* const out =
            parts.n > 1 ? parts.values + slot * dim : a.values[0].out.row(row) + int64_t(head) * dim;
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
    __shared__ float q_units[kPairs], k_units[kRows], v_units[kRows];
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
    const Job job = {a,
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
    Row own[2];
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
    constexpr int kBlocksAtOnce = exact || kTiles > 16 ? 2 : 3, kMost = 32;
    const int64_t places = int64_t(device.processors) * kBlocksAtOnce;
    const int n_parts = blocks < places ? parts_for(args, blocks, places, kMost) : 1;
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
    run<exact, 32, 32>(device, args, view, workspace);
}

bool is_exact(const AttentionArgs& args) {
    return args.scores[0].stored.dtype == DType::F32 || args.values[0].stored.dtype == DType::F32;
}

bool aligned(const void* p, size_t stride) {
    return reinterpret_cast<uintptr_t>(p) % 16 == 0 && stride % 16 == 0;
}

template <class Term>
bool can_read(const Term& term) {
    const Rows& rows = term.stored;
    if (term.dim % 8 || term.dim > kMostDim) return false;
    if (term.fresh && !aligned(term.fresh.data, term.fresh.stride)) return false;
    if (rows.block_tokens == 0)
        return is_float(rows.dtype) && (!rows.base || aligned(rows.base, rows.row_bytes));
    const bool own = rows.heads == term.n_heads && rows.head_dim() == term.dim;
    return aligned(rows.base, rows.block_stride) && (own || rows.heads == 1);
}

}  // namespace

bool prefill_can(const Device& device, const AttentionArgs& args) {
    if (args.scores.size() != 1 || args.values.size() != 1) return false;
    const ScoreTerm& score = args.scores[0];
    if (score.n_heads != args.values[0].n_heads || !can_read(score) || !can_read(args.values[0]))
        return false;
    const int n_rot = score.rope ? score.rope.n_rot : 0;
    if (n_rot % (score.rope.interleaved ? 8 : 16)) return false;
    return shared_bytes(args, is_exact(args) ? 2 : 1, is_exact(args) ? 32 : 64) + 2048 <= device.shared_bytes;
}

void attention_prefill(const Device& device, const AttentionArgs& args, const AttentionView& view,
                       std::byte* workspace) {
    if (is_exact(args)) return run_of<true, 32>(device, args, view, workspace);
    run_of<false, 64>(device, args, view, workspace);
}

}  // namespace slimrt::cuda
