// Attention of any terms, in float32. A block has up to 8 (query, head) pairs that read the same heads of
// rows, and takes its rows 32 at a time: a warp a row for scores, a thread a column for values, whose sums
// are in shared memory.
#include <algorithm>
#include <numeric>

#include "kernels/cuda/attention_parts.cuh"
#include "kernels/cuda/ptx.cuh"

namespace slimrt::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kTile = 32;
constexpr int kMaxPairs = 8;
constexpr int kPairsOfWarp = kMaxPairs / kWarps;
// Where the rows of a tile are: for score terms, value terms, and the factors of score terms.
constexpr int kValuePlaces = 2, kFactorPlaces = kValuePlaces + kMaxValueTerms, kPlaces = kFactorPlaces + 2;
constexpr size_t kMaxShared = 64 << 10;  // of queries and sums

/// Where a row is; if paged, its block and its number there.
struct Place {
    const unsigned char* data;
    int row;
};

__device__ Place place_of(const RowsView& rows, const int32_t* table, int64_t position) {
    if (!rows.paged) return {rows.base + (position - rows.first) * rows.row_bytes, 0};
    return {block_of(rows, table, position), row_in_block(position)};
}

__device__ float element(const RowsView& rows, const Place& at, int column) {
    const int head = column < rows.head_dim ? 0 : column / rows.head_dim;
    if (!rows.paged) return element_of(rows, {at.data, nullptr}, column);
    return element_of(rows, row_in(rows, at.data, at.row, head), column - head * rows.head_dim);
}

/// A block's work, and what its threads share.
struct Group {
    const AttentionView& a;
    const PlacedSequence& s;
    int64_t first_row;       // of the sequence
    int first_head, shared;  // query heads that read the same heads of rows
    int first_pair, n_pairs;
    float *q, *sums;                    // [pair][columns of all terms]
    float (*weights)[kTile], *factors;  // [pair]
    Place (*places)[kTile];             // for score terms, value terms, factors of score terms

    __device__ int query(int pair) const { return (first_pair + pair) / shared; }
    __device__ int head(int pair) const { return first_head + (first_pair + pair) % shared; }
    __device__ int64_t position(int pair) const { return s.position + query(pair); }
    template <class Term>
    __device__ int column(const Term& term) const {  // of a row, where the heads begin
        return first_head / (a.n_heads / term.n_heads) * term.dim;
    }
    /// The t-th term's factor of row i of a tile.
    __device__ float factor_of(const ScoreView& term, const RowsView& factors, int i, int t) const {
        return element(factors, places[kFactorPlaces + t][i],
                       term.head_factors ? column(term) / term.dim : 0);
    }
};

/// The rows of all terms, stored or fresh.
struct Sources {
    RowsView scores[2], values[kMaxValueTerms], factors[2];
    Range range;

    __device__ Sources(const Group& g, bool fresh, Range range) : range(range) {
        const auto pick = [&](const RowsView& stored, const FloatRows& of_step) {
            return fresh ? fresh_view(of_step, g.first_row, g.s.position) : stored;
        };
        for (int t = 0; t < g.a.n_scores; ++t) {
            scores[t] = pick(g.a.scores[t].stored, g.a.scores[t].fresh);
            factors[t] = pick(g.a.scores[t].factors, g.a.scores[t].fresh_factors);
        }
        for (int t = 0; t < g.a.n_values; ++t) values[t] = pick(g.a.values[t].stored, g.a.values[t].fresh);
    }
};

/// A row of a score term, and what is applied to it.
struct ScoreRow {
    const RowsView& rows;
    const Place& at;
    float factor;
    const float* rope_row;  // cos, sin of its pairs
};

/// Adds a row's products with the queries, over this lane's columns.
__device__ void add_products(const Group& g, const ScoreView& term, const float* q, int q_stride,
                             const ScoreRow& row, float (&dots)[kMaxPairs]) {
    const int lane = threadIdx.x % 32, first = g.column(term), half = term.n_rot / 2;
    const auto read = [&](int column) {
        float x = element(row.rows, row.at, first + column);
        if (term.row_scale) x *= term.row_scale[first + column] * row.factor;
        return term.bias ? x + term.bias[first + column] : x;
    };
    const auto add = [&](int column, float x) {
#pragma unroll
        for (int p = 0; p < kMaxPairs; ++p) {
            if (p < g.n_pairs) dots[p] = fmaf(q[p * q_stride + column], x, dots[p]);
        }
    };
    for (int i = lane; i < half; i += 32) {
        const int one = term.interleaved ? 2 * i : i, other = term.interleaved ? one + 1 : i + half;
        const float x = read(one), y = read(other), cos = row.rope_row[2 * i], sin = row.rope_row[2 * i + 1];
        add(one, x * cos - y * sin);
        add(other, x * sin + y * cos);
    }
    for (int i = term.n_rot + lane; i < term.dim; i += 32) add(i, read(i));
}

__device__ float sum_of_warp(float x) {
    for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(~0u, x, lanes);
    return x;
}
__device__ float max_of_warp(float x) {
    for (int lanes = 16; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lanes));
    return x;
}

/// Scores of row i of a tile, to weights[pair][i].
__device__ void score_row(const Group& g, const Sources& from, int64_t position, int i, int q_stride) {
    const AttentionView& a = g.a;
    float dots[kMaxPairs] = {};
    for (int t = 0, first = 0; t < a.n_scores; first += a.scores[t++].dim) {
        const ScoreView& term = a.scores[t];
        const bool scaled = term.fresh_factors.data != nullptr && term.row_scale;
        const ScoreRow row = {from.scores[t], g.places[t][i],
                              scaled ? g.factor_of(term, from.factors[t], i, t) : 1.0f,
                              term.n_rot ? term.rope_table.row(position) : nullptr};
        add_products(g, term, g.q + first, q_stride, row, dots);
    }
    for (int p = 0; p < g.n_pairs; ++p) {
        const Range range = visible_rows(a, g.s, from.range, g.position(p), g.position(p));
        const bool sees = position >= range.first && position < range.end;
        const float s =
            finish_score(a.finish, sum_of_warp(dots[p]), a.scale, sees, g.head(p), position - g.position(p));
        if (threadIdx.x % 32 == 0) g.weights[p][i] = s;
    }
}

/// Online softmax of a tile's scores, for the pairs of this warp.
__device__ void online_softmax(const Group& g, int n, float (&max)[kPairsOfWarp],
                               float (&sum)[kPairsOfWarp]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int k = 0; k < kPairsOfWarp; ++k) {
        const int p = k * kWarps + warp;
        if (p >= g.n_pairs) continue;
        const float s = lane < n ? g.weights[p][lane] : -infinity();
        const float high = fmaxf(max[k], max_of_warp(s)), weight = exp2f(s - reference(high));
        const float factor = exp2f(max[k] - reference(high));
        max[k] = high;
        sum[k] = sum[k] * factor + sum_of_warp(weight);
        g.weights[p][lane] = weight;
        if (lane == 0) g.factors[p] = factor;
    }
}

/// sums = factor * sums + weights * rows.
__device__ void add_values(const Group& g, const Sources& from, int n) {
    const AttentionView& a = g.a;
    for (int t = 0, first = 0; t < a.n_values; first += a.values[t++].dim) {
        const ValueView& term = a.values[t];
        const int column = g.column(term);
        for (int at = threadIdx.x; at < term.dim; at += kThreads) {
            float added[kMaxPairs] = {};
            for (int i = 0; i < n; ++i) {
                const float x = element(from.values[t], g.places[kValuePlaces + t][i], column + at);
#pragma unroll
                for (int p = 0; p < kMaxPairs; ++p) {
                    if (p < g.n_pairs) added[p] = fmaf(g.weights[p][i], x, added[p]);
                }
            }
            float* const sums = g.sums + first + at;
#pragma unroll
            for (int p = 0; p < kMaxPairs; ++p) {
                if (p >= g.n_pairs) continue;
                float& sum = sums[p * a.value_columns];
                sum = fmaf(g.factors[p], sum, added[p]);
            }
        }
    }
}

/// Attention over rows [first, end), stored or fresh ones.
__device__ void add_rows(const Group& g, const Sources& from, Range part, int q_stride,
                         float (&max)[kPairsOfWarp], float (&sum)[kPairsOfWarp]) {
    for (int64_t first = part.first; first < part.end; first += kTile) {
        const int n = static_cast<int>(min(int64_t(kTile), part.end - first)), i = threadIdx.x;
        __syncthreads();  // all have read the last tile's weights and places
        if (i < n) {
            for (int t = 0; t < g.a.n_scores; ++t) {
                g.places[t][i] = place_of(from.scores[t], g.s.table, first + i);
                if (from.factors[t].base)
                    g.places[kFactorPlaces + t][i] = place_of(from.factors[t], g.s.table, first + i);
            }
            for (int t = 0; t < g.a.n_values; ++t)
                g.places[kValuePlaces + t][i] = place_of(from.values[t], g.s.table, first + i);
        }
        __syncthreads();
        for (int row = threadIdx.x / 32; row < n; row += kWarps)
            score_row(g, from, first + row, row, q_stride);
        __syncthreads();
        online_softmax(g, n, max, sum);
        __syncthreads();
        add_values(g, from, n);
    }
}

__device__ void load_queries(const Group& g, int q_stride) {
    for (int t = 0, first = 0; t < g.a.n_scores; first += g.a.scores[t++].dim) {
        const ScoreView& term = g.a.scores[t];
        for (int i = threadIdx.x; i < g.n_pairs * term.dim; i += kThreads) {
            const int p = i / term.dim, column = i % term.dim;
            g.q[p * q_stride + first + column] =
                term.q.row(g.first_row + g.query(p))[g.head(p) * term.q_columns + column];
        }
    }
}

__device__ void write_results(const Group& g, const Parts& parts, int part, const float (&max)[kPairsOfWarp],
                              const float (&sum)[kPairsOfWarp], MergeFactors* shares) {
    const AttentionView& a = g.a;
    const auto slot = [&](int p) { return pair_of(a, blockIdx.z, g.query(p), g.head(p)) * parts.n + part; };
    for (int k = 0; k < kPairsOfWarp; ++k) {
        const int p = k * kWarps + threadIdx.x / 32;
        if (p >= g.n_pairs || threadIdx.x % 32) continue;
        if (parts.n > 1)
            parts.states[slot(p)] = make_float2(max[k], sum[k]);
        else
            shares[p] = finish(a, g.first_row + g.query(p), g.head(p), max[k], sum[k]);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < g.n_pairs * a.value_columns; i += kThreads) {
        const int p = i / a.value_columns, column = i % a.value_columns;
        if (parts.n > 1) {
            parts.values[slot(p) * a.value_columns + column] = g.sums[i];
            continue;
        }
        write(a.result(g.first_row + g.query(p), g.head(p), column), shares[p], g.sums[i]);
    }
}

/// Blocks: pairs of a sequence, groups of heads that share rows x parts, sequences.
__global__ void __launch_bounds__(kThreads)
    general_kernel(AttentionView a, Parts parts, int shared, int pairs, int q_stride) {
    __shared__ float weights[kMaxPairs][kTile], factors[kMaxPairs];
    __shared__ Place places[kPlaces][kTile];
    __shared__ MergeFactors shares[kMaxPairs];
    const PlacedSequence& s = a.sequences[blockIdx.z];
    const int first_pair = blockIdx.x * pairs, n_pairs = min(pairs, s.n_queries * shared - first_pair);
    if (n_pairs <= 0) return;
    float* const q = reinterpret_cast<float*>(shared_memory());
    const int part = blockIdx.y % parts.n, first_head = blockIdx.y / parts.n * shared;
    const Group g = {a,       s, s.query + a.query_shift, first_head, shared,  first_pair,
                     n_pairs, q, q + pairs * q_stride,    weights,    factors, places};
    load_queries(g, q_stride);
    for (int i = threadIdx.x; i < n_pairs * a.value_columns; i += kThreads) g.sums[i] = 0;
    float highs[kPairsOfWarp], sums[kPairsOfWarp] = {};
    for (float& m : highs) m = -infinity();

    const int64_t first = g.position(0), last = g.position(n_pairs - 1);
    const Range stored = stored_rows(a, s, first, last), fresh = fresh_rows(a, s, first, last);
    const int64_t n_stored = stored.size(), n = n_stored + fresh.size();
    const int64_t begin = n * part / parts.n, end = n * (part + 1) / parts.n;
    add_rows(g, Sources(g, false, stored),
             {stored.first + min(begin, n_stored), stored.first + min(end, n_stored)}, q_stride, highs, sums);
    add_rows(g, Sources(g, true, fresh),
             {fresh.first + max(begin - n_stored, int64_t(0)), fresh.first + max(end - n_stored, int64_t(0))},
             q_stride, highs, sums);
    __syncthreads();
    write_results(g, parts, part, highs, sums, shares);
}

}  // namespace

void attention_general(const Device& device, const AttentionArgs& args, const AttentionView& view,
                       std::byte* workspace) {
    int shared = args.n_heads, q_stride = 0;
    for (const ScoreTerm& term : args.scores) {
        shared = std::gcd(shared, args.n_heads / term.n_heads);
        q_stride += term.dim;
    }
    for (const ValueTerm& term : args.values) shared = std::gcd(shared, args.n_heads / term.n_heads);
    const size_t pair_bytes = (q_stride + view.value_columns) * sizeof(float);
    const int most_pairs = most_queries(args) * shared;
    const int fit = static_cast<int>(std::clamp<size_t>(kMaxShared / pair_bytes, 1, kMaxPairs));
    const int pairs = std::min(most_pairs, fit), tiles = (most_pairs + pairs - 1) / pairs;
    const int groups = args.n_heads / shared;
    const int64_t blocks = int64_t(tiles) * groups * int64_t(args.sequences.size());
    constexpr int kBlocksAtOnce = 6, kMax = 32;
    const int n_parts = parts_for(args, blocks, int64_t(device.processors) * kBlocksAtOnce, kMax);
    const Parts parts = place_parts(args, n_parts, workspace);
    launch(device, general_kernel,
           {.grid = dim3(unsigned(tiles), unsigned(groups * n_parts), unsigned(args.sequences.size())),
            .block = dim3(kThreads),
            .shared_bytes = pairs * pair_bytes},
           view, parts, shared, pairs, q_stride);
    if (n_parts > 1) merge_parts(device, args, view, parts);
}

}  // namespace slimrt::cuda
