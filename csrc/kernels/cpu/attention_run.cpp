#include "kernels/cpu/attention_run.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "kernels/cpu/row_address.h"

namespace slimrt::cpu {
namespace {

// A group with few (head, query) pairs reads each row once or twice: directly from the cache if the rows of a
// tile are consecutive, as they are in a block. Other groups first convert them to f32 in scratch.
constexpr int kFewPairs = 8, kFewPairsTile = 32;
// With so many queries scores() transposes a tile once for all of them, so that rows are read once too.
constexpr int kManyPairs = 16;
constexpr int kTiledPairs = 128;  // jobs of so many use TileKernels
constexpr float kInfinity = std::numeric_limits<float>::infinity();

}  // namespace

void AttentionRun::compute(const AttentionItem& item, int thread) const {
    const AttentionJob& job = plan_.jobs[item.job];
    float* const own = scratch(thread);
    float* const state =
        job.n_parts == 1 ? own + plan_.scratch.state : workspace_ + job.states + item.part * plan_.state.size;
    const int heads = job.n_groups * plan_.heads_per_group, pairs = heads * job.n_queries;
    std::fill_n(state + plan_.state.max, pairs, -kInfinity);
    std::fill_n(state + plan_.state.sum, pairs, 0.0f);

    pack_queries(job, own);
    const int64_t n_stored = job.stored.size(), n = n_stored + job.fresh.size();
    const int64_t first = n * item.part / job.n_parts, end = n * (item.part + 1) / job.n_parts;
    const auto within = [&](const Span& span, int64_t before) {
        return Span{span.first + std::max<int64_t>(first - before, 0),
                    span.first + std::min(end - before, span.size())};
    };
    compute_span(job, false, within(job.stored, 0), thread, state);
    compute_span(job, true, within(job.fresh, n_stored), thread, state);
    if (job.n_parts > 1) return;
    for (int head = 0; head < heads; ++head) finish(job, state, head, own + plan_.scratch.weights);
}

void AttentionRun::merge(const AttentionJob& job, int head, int thread) const {
    finish(job, workspace_ + job.states, head, scratch(thread) + plan_.scratch.weights);
}

/// Whether TileKernels multiply a job. Its queries and softmax weights are then packed where the floats were.
bool AttentionRun::by_tiles(const AttentionJob& job) const {
    if (!isa_.tiles || plan_.few(job.n_queries) || args_.scores.size() != 1) return false;
    if (job.n_queries * plan_.heads_per_group < kTiledPairs || plan_.tile % kPackedMultiple != 0)
        return false;
    const int dim = args_.scores[0].dim;
    return dim % kPackedMultiple == 0 && dim <= kMaxPacked &&
           std::ranges::all_of(args_.values, [](const ValueTerm& term) { return term.dim % 16 == 0; });
}

void AttentionRun::pack_queries(const AttentionJob& job, float* scratch) const {
    const int first_head = job.first_group * plan_.heads_per_group;
    const int first_query = job.sequence->query + job.first_query;
    for (size_t t = 0; t < args_.scores.size(); ++t) {
        const ScoreTerm& term = args_.scores[t];
        const int64_t head_columns = term.q.cols / args_.n_heads;
        float* to = scratch + plan_.scratch.q[t];
        const bool packs = plan_.packs_queries && plan_.few(job.n_queries), tiled = by_tiles(job);
        const int64_t packed_bytes = packed_query_bytes(term.dim);
        std::byte* packed = reinterpret_cast<std::byte*>(scratch + plan_.scratch.packed_q);
        for (int head = 0; head < job.n_groups * plan_.heads_per_group; ++head) {
            for (int query = 0; query < job.n_queries; ++query, to += term.dim) {
                const float* from = term.q.f32(first_query + query) + (first_head + head) * head_columns;
                std::memcpy(to, from, term.dim * sizeof(float));
                if (packs) isa_.pack_query(to, term.dim, std::exchange(packed, packed + packed_bytes));
                if (tiled) isa_.tiles->pack(to, term.dim, args_.scale);
            }
        }
    }
}

/// Rows that all queries attend to go block by block through one kernel if queries are few and terms simple;
/// others go tile by tile, and within a tile group by group, so that rows and scores of a group stay in L1.
void AttentionRun::compute_span(const AttentionJob& job, bool fresh, Span span, int thread,
                                float* state) const {
    float* const own = scratch(thread);
    const bool absorbs = plan_.absorbs && !fresh, sparse_absorbed = plan_.sparse_absorbed && !fresh;
    const bool by_block = plan_.by_block && !(fresh && args_.scores[0].rope);
    if (!(by_block || absorbs || sparse_absorbed) || !plan_.few(job.n_queries))
        return compute_tiles(job, fresh, span, own, state);
    // The window of the last query starts last; causality ends the first query first.
    const int64_t begin = args_.window > 0 ? job.position(job.n_queries - 1) - args_.window + 1 : span.first;
    const int64_t seen = std::clamp(begin, span.first, span.end);
    const int64_t end = std::clamp(job.last_seen(0) + 1, seen, span.end);
    compute_tiles(job, fresh, {span.first, seen}, own, state);
    if (sparse_absorbed) {
        compute_sparse(job, {seen, end}, own, state, counts_[thread]);
    } else if (absorbs) {
        compute_absorbed(job, {seen, end}, own, state);
    } else if (plan_.by_budget && !fresh) {
        compute_by_budget(job, {seen, end}, own, state, counts_[thread]);
    } else {
        compute_blocks(job, fresh, {seen, end}, own, state);
    }
    compute_tiles(job, fresh, {end, span.end}, own, state);
}

void AttentionRun::compute_tiles(const AttentionJob& job, bool fresh, Span span, float* scratch,
                                 float* state) const {
    const int pairs = plan_.heads_per_group * job.n_queries;
    const int64_t max_rows = pairs <= kFewPairs ? std::min(plan_.tile, kFewPairsTile) : plan_.tile;
    for (int64_t first = span.first, end; first < span.end; first = end) {
        end = std::min(span.end, (first / max_rows + 1) * max_rows);
        for (int i = 0; i < job.n_groups; ++i) {
            compute_tile({job, job.first_group + i, i * pairs, pairs, scratch, state},
                         {fresh, first, static_cast<int>(end - first)});
        }
    }
}

void AttentionRun::compute_tile(const Group& group, const Tile& tile) const {
    float* const scores = group.scratch + plan_.scratch.scores;
    const size_t ld = plan_.tile;
    for (size_t t = 0; t < args_.scores.size(); ++t) compute_scores(group, tile, t, scores, ld);
    softmax_tile(group, tile);
    if (by_tiles(group.job))
        for (int pair = 0; pair < group.n_pairs; ++pair) isa_.tiles->pack(scores + pair * ld, tile.n, 1);
    for (size_t t = 0; t < args_.values.size(); ++t)
        add_values(group, tile, t, scores, ld, group.scratch + plan_.scratch.factor);
}

/// Packed rows x and the columns of a head in rows of F32, for TileKernels.
TiledRows AttentionRun::tiled_rows(const float* x, size_t x_stride, int n_x, const RowView& rows, int head,
                                   int n, int64_t dim) {
    return {x,
            static_cast<int64_t>(x_stride),
            n_x,
            reinterpret_cast<const float*>(rows.column(head * dim)),
            static_cast<int64_t>(rows.stride / sizeof(float)),
            n,
            dim};
}

/// Adds one term's values of a tile to the sums of a group, after multiplying these by `factor`.
void AttentionRun::add_values(const Group& group, const Tile& tile, size_t t, const float* weights, size_t ld,
                              const float* factor) const {
    const ValueTerm& term = args_.values[t];
    const bool tiled = by_tiles(group.job);
    const RowView rows = read(group, term, tile, tiled, false);
    const int heads = term.n_heads / plan_.n_groups, share = group.n_pairs / heads;
    const size_t stride = row_stride(term.dim);
    float* sums = group.state + plan_.state.values[t] + group.first_pair * stride;
    for (int head = 0; head < heads; ++head, weights += share * ld, factor += share, sums += share * stride) {
        if (tiled) {
            const TiledRows packed = tiled_rows(weights, ld, share, rows, head, tile.n, term.dim);
            isa_.tiles->values(packed, factor, sums, stride);
            continue;
        }
        isa_.values(weights, ld, share, factor, rows.type(), rows.column(head * term.dim), rows.stride,
                    tile.n, term.dim, sums, stride);
    }
}

/// One term's scores of a tile, added to those of the terms before.
void AttentionRun::compute_scores(const Group& group, const Tile& tile, size_t t, float* scores,
                                  size_t ld) const {
    const ScoreTerm& term = args_.scores[t];
    const RowView rows = read_for_scores(group, term, tile);
    const int heads = term.n_heads / plan_.n_groups, share = group.n_pairs / heads;
    const bool tiled = by_tiles(group.job);
    const float* q = group.scratch + plan_.scratch.q[t] + int64_t(group.first_pair) * term.dim;
    for (int head = 0; head < heads; ++head, q += int64_t(share) * term.dim, scores += share * ld) {
        if (tiled) {
            isa_.tiles->scores(tiled_rows(q, term.dim, share, rows, head, tile.n, term.dim), scores, ld);
            continue;
        }
        isa_.scores(q, term.dim, share, rows.type(), rows.column(head * term.dim), rows.stride, tile.n,
                    term.dim, args_.scale, t > 0, scores, ld);
    }
}

/// The bias of a head for the row at `distance` from the query, and after it those of the next rows; nullptr:
/// none.
const float* AttentionRun::bias_of(int head, int64_t distance) const {
    return args_.relative_bias ? args_.relative_bias.f32(head) + args_.relative_origin + distance : nullptr;
}

/// Online softmax of a tile; weights of masked rows are 0.
void AttentionRun::softmax_tile(const Group& group, const Tile& tile) const {
    const int n_queries = group.job.n_queries;
    for (int query = 0; query < n_queries; ++query) {
        const int64_t position = group.job.position(query);
        const int64_t last = std::min<int64_t>(group.job.last_seen(query) - tile.first + 1, tile.n);
        const int end = static_cast<int>(std::max<int64_t>(last, 0));
        const int64_t unseen = args_.window > 0 ? position - args_.window + 1 - tile.first : 0;
        const int begin = static_cast<int>(std::clamp<int64_t>(unseen, 0, end));
        for (int pair = query; pair < group.n_pairs; pair += n_queries) {
            float* const s = group.scratch + plan_.scratch.scores + int64_t(pair) * plan_.tile;
            float* const factor = group.scratch + plan_.scratch.factor + pair;
            float* const max = group.state + plan_.state.max + group.first_pair + pair;
            float* const sum = group.state + plan_.state.sum + group.first_pair + pair;
            const int head =
                group.job.first_group * plan_.heads_per_group + (group.first_pair + pair) / n_queries;
            if (plan_.finishes_scores && begin < end)
                isa_.finish_scores(s + begin, end - begin, args_.score_cap,
                                   bias_of(head, tile.first + begin - position));
            std::fill(s, s + begin, 0.0f);
            std::fill(s + end, s + tile.n, 0.0f);
            // Factor 0 before the first row of a pair: its values are not initialised.
            *factor = begin < end ? isa_.softmax(s + begin, end - begin, max, sum) : *sum == 0 ? 0.0f : 1.0f;
        }
    }
}

/// The columns of a group in a tile's rows: in place if they are read by few queries or only `once`, else
/// (with `copy`: always) converted to f32 in scratch.
template <class Term>
AttentionRun::RowView AttentionRun::read(const Group& group, const Term& term, const Tile& tile, bool copy,
                                         bool once) const {
    const Rows rows = tile.fresh ? fresh_rows(term.fresh, *group.job.sequence) : term.stored;
    const int width = term.n_heads / plan_.n_groups * term.dim, first = group.index * width;
    const int dim = std::min(width, rows.head_dim());  // columns read of one stored head
    assert(width % dim == 0 && (rows.heads == 1 || first % dim == 0));
    const int32_t* const table = group.job.sequence->table;
    const int64_t end = tile.first + tile.n;
    const bool few = group.n_pairs <= kFewPairs || once;
    const bool direct = !copy && is_float(rows.dtype) && width == dim && few;
    float* const to = group.scratch + plan_.scratch.rows;
    const size_t stride = row_stride(width);
    for (int64_t position = tile.first, n = 0; position < end; position += n) {
        for (int column = 0; column < width; column += dim) {
            const int head = (first + column) / rows.head_dim();
            const int begin = (first + column) % rows.head_dim();
            const HeadRun run = rows_at(rows, table, position, end, head);
            if (direct && run.n == tile.n)
                return {run.data + row_bytes(rows.dtype, begin), rows.dtype, run.stride};
            load_run(isa_, rows, run, begin, dim, to + (position - tile.first) * stride + column, stride);
            n = run.n;
        }
    }
    return {reinterpret_cast<const std::byte*>(to), DType::F32, stride * sizeof(float)};
}

/// The factor of a head in row i of a tile (static scales per channel are times it).
float AttentionRun::factor_of(const Group& group, const ScoreTerm& term, const Tile& tile, int i,
                              int head) const {
    if (!term.fresh_factors) return 1;
    const AttentionSequence& sequence = *group.job.sequence;
    Rows rows = tile.fresh ? fresh_rows(term.fresh_factors, sequence) : term.factors;
    rows.heads = rows.width;
    const int64_t at = tile.first + i;
    const HeadRun run = rows_at(rows, sequence.table, at, at + 1, rows.heads == 1 ? 0 : head);
    return *reinterpret_cast<const float*>(run.data);
}

AttentionRun::RowView AttentionRun::read_for_scores(const Group& group, const ScoreTerm& term,
                                                    const Tile& tile) const {
    const int heads = term.n_heads / plan_.n_groups, width = heads * term.dim;
    const bool changes = term.row_scale || term.bias || term.rope || by_tiles(group.job);
    const RowView rows = read(group, term, tile, changes, heads == 1 && group.n_pairs >= kManyPairs);
    float* row = group.scratch + plan_.scratch.rows;
    for (int i = 0; i < tile.n; ++i, row += row_stride(width)) {
        const int alike = term.fresh_factors.cols > 1 ? term.dim : width;  // columns that share a factor
        for (int at = 0; term.row_scale && at < width; at += alike) {
            const float factor = factor_of(group, term, tile, i, group.index * heads + at / term.dim);
            isa_.multiply(row + at, term.row_scale.f32() + group.index * width + at, factor, alike);
        }
        if (term.bias) isa_.add(row, term.bias.f32() + group.index * width, width);
        if (!term.rope) continue;
        const float* const rotation = term.rope.table.f32(tile.first + i);
        for (int head = 0; head < heads; ++head) {
            isa_.rope(row + head * term.dim, rotation, term.rope.n_rot, term.rope.interleaved);
        }
    }
    return rows;
}

/// Writes one head of a job: out = the parts' values, each weighted by its share of the softmax, and, if
/// args.merge, combined with what out and lse already hold.
void AttentionRun::finish(const AttentionJob& job, const float* states, int head, float* weights) const {
    const int q_head = job.first_group * plan_.heads_per_group + head;
    for (int query = 0; query < job.n_queries; ++query) {
        const int m = head * job.n_queries + query;
        const int64_t row = job.sequence->query + job.first_query + query;
        float* const lse = args_.lse ? args_.lse.f32(row) + q_head : nullptr;
        const auto max = [&](int part) { return states[part * plan_.state.size + plan_.state.max + m]; };
        const auto sum = [&](int part) { return states[part * plan_.state.size + plan_.state.sum + m]; };

        const float before = args_.merge ? *lse : -kInfinity;
        const float sink = args_.sinks ? args_.sinks.f32()[q_head] : -kInfinity;
        float high = std::max(before, sink);
        for (int part = 0; part < job.n_parts; ++part) high = std::max(high, max(part));
        if (high == -kInfinity) high = 0;  // no row, or only NaN
        float keep = std::exp(before - high), total = keep + std::exp(sink - high);
        bool seen = false;  // else values are not initialised
        for (int part = 0; part < job.n_parts; ++part) {
            weights[part] = std::exp(max(part) - high);
            total += weights[part] * sum(part);
            seen |= sum(part) != 0;
        }
        if (lse) *lse = high + std::log(total);
        const float share = total == 0 ? 0 : 1 / total;
        keep *= share;
        for (int part = 0; part < job.n_parts; ++part) weights[part] *= share;
        for (size_t t = 0; t < args_.values.size(); ++t) {
            const ValueTerm& term = args_.values[t];
            const size_t stride = row_stride(term.dim);
            isa_.values(weights, job.n_parts, 1, &keep, static_cast<uint32_t>(DType::F32),
                        states + plan_.state.values[t] + m * stride, plan_.state.size * sizeof(float),
                        seen ? job.n_parts : 0, term.dim,
                        term.out.f32(row) + q_head * (term.out.cols / args_.n_heads), 0);
        }
    }
}

}  // namespace slimrt::cpu
