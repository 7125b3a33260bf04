#include "kernels/cpu/attention_run.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/cpu/row_address.h"

namespace slimrt::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// Fresh rows are dense rows of f32.
Rows rows_of(const Rows& stored, const Tensor& fresh, const AttentionJob& job, bool is_fresh) {
    if (!is_fresh) return stored;
    Rows rows;
    rows.base = fresh.row(job.sequence->query);
    rows.width = static_cast<int>(fresh.cols);
    rows.row_bytes = fresh.stride;
    rows.first = job.sequence->position;
    return rows;
}

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
    compute_span(job, false, within(job.stored, 0), own, state);
    compute_span(job, true, within(job.fresh, n_stored), own, state);
    if (job.n_parts > 1) return;
    for (int head = 0; head < heads; ++head) finish(job, state, head, own + plan_.scratch.weights);
}

void AttentionRun::merge(const AttentionJob& job, int head, int thread) const {
    finish(job, workspace_ + job.states, head, scratch(thread) + plan_.scratch.weights);
}

void AttentionRun::pack_queries(const AttentionJob& job, float* scratch) const {
    const int first_head = job.first_group * plan_.heads_per_group;
    const int first_query = job.sequence->query + job.first_query;
    for (size_t t = 0; t < args_.scores.size(); ++t) {
        const ScoreTerm& term = args_.scores[t];
        float* to = scratch + plan_.scratch.q[t];
        for (int head = 0; head < job.n_groups * plan_.heads_per_group; ++head) {
            for (int query = 0; query < job.n_queries; ++query, to += term.dim) {
                const float* from = term.q.f32(first_query + query) + int64_t(first_head + head) * term.dim;
                std::memcpy(to, from, term.dim * sizeof(float));
            }
        }
    }
}

void AttentionRun::compute_span(const AttentionJob& job, bool fresh, Span span, float* scratch,
                                float* state) const {
    for (int64_t first = span.first; first < span.end; first += plan_.tile) {
        const int n = static_cast<int>(std::min<int64_t>(plan_.tile, span.end - first));
        compute_tile(job, {fresh, first, n}, scratch, state);
    }
}

void AttentionRun::compute_tile(const AttentionJob& job, const Tile& tile, float* scratch,
                                float* state) const {
    float* const rows_scratch = scratch + plan_.scratch.rows;
    float* const scores = scratch + plan_.scratch.scores;
    const int ld = plan_.tile;
    const int pairs = job.n_groups * plan_.heads_per_group * job.n_queries;
    for (size_t t = 0; t < args_.scores.size(); ++t) {
        const ScoreTerm& term = args_.scores[t];
        const RowView rows = read_for_scores(job, term, tile, rows_scratch);
        const int heads = term.n_heads / plan_.n_groups * job.n_groups, share = pairs / heads;
        const float* q = scratch + plan_.scratch.q[t];
        for (int head = 0; head < heads; ++head) {
            isa_.scores(q + int64_t(head) * share * term.dim, term.dim, share, rows.data + head * term.dim,
                        rows.stride, tile.n, term.dim, args_.scale, t > 0, scores + head * share * ld, ld);
        }
    }
    weigh(job, tile, scratch, state);
    const float* factor = scratch + plan_.scratch.factor;
    for (size_t t = 0; t < args_.values.size(); ++t) {
        const ValueTerm& term = args_.values[t];
        const int per_group = term.n_heads / plan_.n_groups, heads = per_group * job.n_groups;
        const RowView rows =
            read(job, rows_of(term.stored, term.fresh, job, tile.fresh), tile,
                 job.first_group * per_group * term.dim, heads * term.dim, false, rows_scratch);
        const int share = pairs / heads;
        const size_t stride = row_stride(term.dim);
        for (int head = 0; head < heads; ++head) {
            isa_.values(scores + head * share * ld, ld, share, factor + head * share,
                        rows.data + head * term.dim, rows.stride, tile.n, term.dim,
                        state + plan_.state.values[t] + head * share * stride, stride);
        }
    }
}

/// Scores to softmax weights, zero where a query does not see.
void AttentionRun::weigh(const AttentionJob& job, const Tile& tile, float* scratch, float* state) const {
    float* const max = state + plan_.state.max;
    float* const sum = state + plan_.state.sum;
    float* const factor = scratch + plan_.scratch.factor;
    const int heads = job.n_groups * plan_.heads_per_group;
    for (int query = 0; query < job.n_queries; ++query) {
        const int64_t position = job.position(query);
        const int64_t last = std::min<int64_t>(position - tile.first + 1, tile.n);
        const int end = static_cast<int>(std::max<int64_t>(last, 0));
        const int64_t unseen = args_.window > 0 ? position - args_.window + 1 - tile.first : 0;
        const int begin = static_cast<int>(std::clamp<int64_t>(unseen, 0, end));
        for (int head = 0; head < heads; ++head) {
            const int m = head * job.n_queries + query;
            float* const s = scratch + plan_.scratch.scores + int64_t(m) * plan_.tile;
            std::fill(s, s + begin, 0.0f);
            std::fill(s + end, s + tile.n, 0.0f);
            // Before its first row a pair's values are whatever was in the scratch.
            if (begin == end)
                factor[m] = sum[m] == 0 ? 0.0f : 1.0f;
            else
                factor[m] = isa_.softmax(s + begin, end - begin, max + m, sum + m);
        }
    }
}

/// Columns [first, first + width) of a tile's rows as f32: where they are, or else (`copy`: always) in `to`.
AttentionRun::RowView AttentionRun::read(const AttentionJob& job, const Rows& rows, const Tile& tile,
                                         int first, int width, bool copy, float* to) const {
    const size_t offset = row_bytes(rows.dtype, first), stride = row_stride(width);
    const bool direct = !copy && rows.dtype == DType::F32 && rows.row_bytes % sizeof(float) == 0;
    const int64_t end = tile.first + tile.n;
    for (int64_t position = tile.first; position < end;) {
        const RowRun run = rows_at(rows, job.sequence->table, position, end);
        const std::byte* from = run.data + offset;
        if (direct && run.n == tile.n) {
            return {reinterpret_cast<const float*>(from), rows.row_bytes / sizeof(float)};
        }
        isa_.widen(static_cast<uint32_t>(rows.dtype), from, rows.row_bytes, run.n, width,
                   to + (position - tile.first) * stride, stride);
        position += run.n;
    }
    return {to, stride};
}

AttentionRun::RowView AttentionRun::read_for_scores(const AttentionJob& job, const ScoreTerm& term,
                                                    const Tile& tile, float* to) const {
    const int per_group = term.n_heads / plan_.n_groups, heads = per_group * job.n_groups;
    const int first = job.first_group * per_group * term.dim, width = heads * term.dim;
    const bool changed = term.bias || term.rope;
    const RowView rows =
        read(job, rows_of(term.stored, term.fresh, job, tile.fresh), tile, first, width, changed, to);
    if (!changed) return rows;
    for (int i = 0; i < tile.n; ++i) {
        float* const row = to + i * rows.stride;
        if (term.bias) isa_.add(row, term.bias.f32() + first, width);
        if (!term.rope) continue;
        const float* const turn = term.rope.table.f32(tile.first + i);
        for (int head = 0; head < heads; ++head) {
            isa_.rope(row + head * term.dim, turn, term.rope.n_rot, term.rope.interleaved);
        }
    }
    return rows;
}

/// One head of a job: out = the parts' values, each weighted by its share of the softmax, together with what
/// out and lse already hold when args.merge is set.
void AttentionRun::finish(const AttentionJob& job, const float* states, int head, float* weights) const {
    const int q_head = job.first_group * plan_.heads_per_group + head;
    for (int query = 0; query < job.n_queries; ++query) {
        const int m = head * job.n_queries + query;
        const int64_t row = job.sequence->query + job.first_query + query;
        float* const lse = args_.lse ? args_.lse.f32(row) + q_head : nullptr;
        const auto max = [&](int part) { return states[part * plan_.state.size + plan_.state.max + m]; };
        const auto sum = [&](int part) { return states[part * plan_.state.size + plan_.state.sum + m]; };

        const float before = args_.merge ? *lse : -kInfinity;
        float high = before;
        for (int part = 0; part < job.n_parts; ++part) high = std::max(high, max(part));
        if (high == -kInfinity) high = 0;  // nothing seen, or only NaN
        float keep = std::exp(before - high), total = keep;
        bool seen = false;  // else there may be no values to read
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
            isa_.values(weights, job.n_parts, 1, &keep, states + plan_.state.values[t] + m * stride,
                        plan_.state.size, seen ? job.n_parts : 0, term.dim,
                        term.out.f32(row) + int64_t(q_head) * term.dim, 0);
        }
    }
}

}  // namespace slimrt::cpu
