// Attention of few queries over absorbed rows, absorbed_rows at a time: scores by each term, online softmax,
// then the weighted sum of values for all heads (see absorb_values()).
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

#include "kernels/cpu/attention_run.h"
#include "kernels/cpu/row_address.h"

namespace slimrt::cpu {
namespace {

constexpr float kQ15One = 32767;  // 1 in Q15

/// fn(i, a, b) for pair i of RoPE, which rotates columns a and b of a head.
template <class Fn>
void each_pair(const Rope& rope, const Fn& fn) {
    for (int i = 0; i < rope.n_rot / 2; ++i)
        rope.interleaved ? fn(i, 2 * i, 2 * i + 1) : fn(i, i, i + rope.n_rot / 2);
}

/// Prefetches a row of the RoPE table, which is too long for the caches.
void prefetch_rotation(const Rope& rope, int64_t position) {
    constexpr int kFloats = 16;  // of a cache line
    if (!rope || position >= rope.table.rows) return;
    for (int i = 0; i < rope.n_rot; i += kFloats) __builtin_prefetch(rope.table.f32(position) + i);
}

constexpr auto to_q15 = [](float rotation) {
    return static_cast<int16_t>(kQ15One * rotation + (rotation < 0 ? -0.5f : 0.5f));
};

/// The rotation of each row of a block relative to its first row, which does not depend on the block: cosines
/// and sines as rotation_at() has them. Columns without RoPE get cosine 1.
template <class Number, class Make>
void fill_row_rotations(const Rope& rope, int64_t dim, Number* to, const Make& make) {
    // The inverse rotation of row 0 of the table.
    float cos_part[kMaxRotatedDim / 2], sin_part[kMaxRotatedDim / 2];
    const float* const first = rope ? rope.table.f32(0) : nullptr;
    each_pair(rope, [&](int i, int, int) {
        const float cosine = first[2 * i], sine = first[2 * i + 1], size = cosine * cosine + sine * sine;
        cos_part[i] = cosine / size;
        sin_part[i] = sine / size;
    });
    const Number one = make(1.0f);
    for (int64_t row = 0; row < kBlockTokens; ++row) {
        const auto set = [&](int64_t column, Number cosine, Number sine) {
            Number* const rotation = rotation_at(to, dim, row, column);
            rotation[0] = cosine;
            rotation[kRotationColumns] = sine;
        };
        for (int64_t c = rope.n_rot; c < dim; ++c) set(c, one, Number(0));
        const float* const row_rotation = rope ? rope.table.f32(row) : nullptr;
        each_pair(rope, [&](int i, int a, int b) {
            const float c = row_rotation[2 * i], s = row_rotation[2 * i + 1];
            const Number cosine = make(c * cos_part[i] + s * sin_part[i]),
                         sine = make(s * cos_part[i] - c * sin_part[i]);
            set(a, cosine, sine);
            set(b, cosine, sine);
        });
    }
}

}  // namespace

/// Packs one query of a head for score_rotated(): q, and q rotated by 90 degrees, times the static scales of
/// the channels, normalised so that no rotation exceeds int16.
void AttentionRun::pack_rotated_query(const ScoreTerm& term, int head, const float* q, float* to) const {
    const int64_t dim = rotated_dim(term.dim);
    const float* const scale = term.row_scale ? term.row_scale.f32() + int64_t(head) * term.dim : nullptr;
    const auto scaled = [&](int64_t c, float x) { return scale ? x * scale[c] : x; };
    float *const cos_part = to + sizeof(RotatedQuery) / sizeof(float), *const sin_part = cos_part + dim;
    std::fill_n(cos_part, 2 * dim, 0.0f);
    float top = 0;
    const auto squares = [](double x, double y) { return x * x + y * y; };
    const auto root = [](double x) { return static_cast<float>(std::sqrt(x)); };
    const auto widen = [&](float size) { top = size > top || size != size ? size : top; };  // propagates NaN
    for (int64_t c = term.rope.n_rot; c < term.dim; ++c) widen(std::fabs(cos_part[c] = scaled(c, q[c])));
    const float* const first = term.rope ? term.rope.table.f32(0) : nullptr;
    each_pair(term.rope, [&](int i, int a, int b) {
        cos_part[a] = scaled(a, q[a]);
        cos_part[b] = scaled(b, q[b]);
        sin_part[a] = scaled(a, q[b]);
        sin_part[b] = scaled(b, -q[a]);
        const double size = squares(first[2 * i], first[2 * i + 1]);
        widen(root(size * squares(cos_part[a], sin_part[a])));
        widen(root(size * squares(cos_part[b], sin_part[b])));
    });
    const bool usable = top >= 0x1p-100f && top <= 0x1p100f;
    const float shrink = usable ? (kQ15One - 1) / top : 0, nan = std::numeric_limits<float>::quiet_NaN();
    for (int64_t c = 0; c < 2 * dim; ++c) cos_part[c] = usable ? cos_part[c] * shrink : 0;
    *to = args_.scale * (usable ? top / (kQ15One - 1) : top < 1 ? 0 : nan);
}

/// Prepares queries and relative rotations for the scores of all terms.
void AttentionRun::prepare_absorbed(const AttentionJob& job, float* scratch) const {
    const int pairs = plan_.heads_per_group * job.n_queries;
    std::fill_n(weight_stats(scratch), pairs, WeightStats{});
    std::fill_n(scratch + plan_.scratch.ones, pairs, 1.0f);
    int32_t* const all = reinterpret_cast<int32_t*>(scratch + plan_.scratch.pairs);
    if (plan_.absorbs) std::iota(all, all + pairs, 0);
    for (size_t t = 0; t < args_.scores.size(); ++t) {
        const ScoreTerm& term = args_.scores[t];
        if (plan_.by_group[t]) group_queries(t, pairs, scratch);
        if (!plan_.rotates_query[t]) continue;
        const int64_t dim = rotated_dim(term.dim), share = pairs / term.n_heads;
        const float* const q = scratch + plan_.scratch.q[t];
        float* const packed = scratch + plan_.scratch.rotated_q[t];
        for (int pair = 0; pair < pairs; ++pair)
            pack_rotated_query(term, static_cast<int>(pair / share), q + int64_t(pair) * term.dim,
                               packed + pair * rotated_query_floats(term.dim));
        float* const rotations = scratch + plan_.scratch.row_rotations[t];
        if (term.stored.dtype == DType::Q8)
            fill_row_rotations(term.rope, dim, reinterpret_cast<int16_t*>(rotations), to_q15);
        else
            fill_row_rotations(term.rope, dim, rotations, [](float rotation) { return rotation; });
    }
}

/// Scores of one term for the rows from `position` on, of one block, by score_rotated().
void AttentionRun::score_by_rotation(const AttentionJob& job, size_t t, int64_t position, int64_t end,
                                     float* scratch, float* scores, size_t ld) const {
    const ScoreTerm& term = args_.scores[t];
    const int64_t dim = rotated_dim(term.dim);
    float* const first = scratch + plan_.scratch.first_rotation;
    std::fill_n(first, dim, 1.0f);
    std::fill_n(first + dim, dim, 0.0f);
    const float* const table = term.rope ? term.rope.table.f32(position) : nullptr;
    prefetch_rotation(term.rope, position + kBlockTokens);
    each_pair(term.rope, [&](int i, int a, int b) {
        first[a] = first[b] = table[2 * i];
        first[dim + a] = first[dim + b] = table[2 * i + 1];
    });
    const HeadRun run = rows_at(term.stored, job.sequence->table, position, end, 0);
    const bool whole = term.stored.heads == 1;
    const size_t head = whole ? 0 : head_bytes(term.stored.dtype, term.dim).total() * kBlockTokens;
    const int64_t next = (position / kBlockTokens + 1) * kBlockTokens;
    const bool more = whole && next < job.stored.end;
    const auto* const factors =
        term.fresh_factors ? rows_at(term.factors, job.sequence->table, position, end, 0).data : nullptr;
    isa_.score_rotated(
        {.type = static_cast<uint32_t>(term.stored.dtype),
         .data = run.data,
         .scales = run.scales,
         .head_stride = head,
         .stride = run.stride,
         .n = run.n,
         .n_heads = term.n_heads,
         .n_q = plan_.heads_per_group * job.n_queries / term.n_heads,
         .dim = term.dim,
         .stored_dim = term.stored.head_dim(),
         .q = reinterpret_cast<const RotatedQuery*>(scratch + plan_.scratch.rotated_q[t]),
         .first = first,
         .rotations = scratch + plan_.scratch.row_rotations[t],
         .next = more ? rows_at(term.stored, job.sequence->table, next, next + 1, 0).data : nullptr,
         .factors = reinterpret_cast<const float*>(factors),
         .factors_of_head = term.factors.width > 1 ? kBlockTokens : 0,
         .accumulate = t > 0,
         .out = scores,
         .ld = ld});
}

/// Splits queries by stored head of whole rows, each of which has scales of its own.
void AttentionRun::group_queries(size_t t, int pairs, float* scratch) const {
    const Rows& rows = args_.scores[t].stored;
    const int64_t dim = rows.head_dim();
    float* to = scratch + plan_.scratch.grouped_q[t];
    std::byte* packed = reinterpret_cast<std::byte*>(scratch + plan_.scratch.packed_groups[t]);
    for (int64_t group = 0; group < rows.heads; ++group) {
        const float* from = scratch + plan_.scratch.q[t] + group * dim;
        for (int pair = 0; pair < pairs; ++pair, to += dim, from += rows.width) {
            std::memcpy(to, from, dim * sizeof(float));
            isa_.pack_query(to, dim, std::exchange(packed, packed + packed_query_bytes(dim)));
        }
    }
}

/// Scores of whole rows from `position` on, of one block: the sum of the products with each stored head.
void AttentionRun::score_by_groups(const AttentionJob& job, size_t t, int64_t position, int64_t end,
                                   float* scratch, float* scores, size_t ld) const {
    const Rows& rows = args_.scores[t].stored;
    const int64_t dim = rows.head_dim(), pairs = int64_t(plan_.heads_per_group) * job.n_queries;
    const auto* const packed = reinterpret_cast<const std::byte*>(scratch + plan_.scratch.packed_groups[t]);
    for (int group = 0; group < rows.heads; ++group) {
        const HeadRun run = rows_at(rows, job.sequence->table, position, end, group);
        const BlockRows head = {.type = static_cast<uint32_t>(rows.dtype),
                                .data = run.data,
                                .scales = run.scales,
                                .head_stride = head_bytes(rows.dtype, dim).total() * kBlockTokens,
                                .stride = run.stride,
                                .dim = dim};
        isa_.score_block({.k = head,
                          .n = run.n,
                          .n_heads = 1,
                          .n_q = pairs,
                          .k_heads = 1,
                          .q = scratch + plan_.scratch.grouped_q[t] + group * pairs * dim,
                          .packed_q = packed + group * pairs * packed_query_bytes(dim),
                          .scale = args_.scale,
                          .n_queries = pairs,
                          .accumulate = t > 0 || group > 0},
                         scores, ld);
    }
}

/// Scores of the rows [position, end), which are in one block; by integer products where the terms allow it.
void AttentionRun::score_absorbed(const AttentionJob& job, int64_t position, int64_t end, float* scratch,
                                  float* state, float* scores, size_t ld) const {
    if (plan_.by_block) {
        const BlockAttention block = block_at(job, false, position, end, 0, 1, scratch, state);
        return isa_.score_block(block, scores, ld);
    }
    const int pairs = plan_.heads_per_group * job.n_queries;
    const Group group{job, 0, 0, pairs, scratch, state};
    for (size_t t = 0; t < args_.scores.size(); ++t) {
        if (plan_.rotates_query[t]) {
            score_by_rotation(job, t, position, end, scratch, scores, ld);
            continue;
        }
        if (plan_.by_group[t]) {
            score_by_groups(job, t, position, end, scratch, scores, ld);
            continue;
        }
        for (int64_t first = position; first < end; first += plan_.tile) {
            const int n = static_cast<int>(std::min<int64_t>(plan_.tile, end - first));
            compute_scores(group, {false, first, n}, t, scores + (first - position), ld);
        }
    }
}

/// Online softmax of the rows [position, end); rows around them get weight 0.
void AttentionRun::softmax_absorbed(const AttentionJob& job, int64_t position, int64_t end, float* scratch,
                                    float* state) const {
    const int pairs = plan_.heads_per_group * job.n_queries;
    const int64_t rows = plan_.absorbed_rows, first = position % rows, n = end - position;
    for (int pair = 0; pair < pairs; ++pair) {
        float* const s = scratch + plan_.scratch.absorbed + int64_t(pair) * kAbsorbedRows;
        float* const factor = scratch + plan_.scratch.factor + pair;
        if (plan_.finishes_scores && !plan_.by_block)
            isa_.finish_scores(s + first, n, args_.score_cap,
                               bias_of(pair / job.n_queries, position - job.position(pair % job.n_queries)));
        *factor = isa_.softmax(s + first, n, state + plan_.state.max + pair, state + plan_.state.sum + pair);
        std::fill(s, s + first, 0.0f);
        std::fill(s + first + n, s + rows, 0.0f);
    }
}

/// Moves outlier weights to a list; returns how many.
int64_t AttentionRun::extract_outliers(int pairs, float* scratch) const {
    Outlier* const outliers = reinterpret_cast<Outlier*>(scratch + plan_.scratch.outliers);
    int64_t n = 0;
    for (int pair = 0; pair < pairs; ++pair)
        n += isa_.extract_outliers(scratch + plan_.scratch.absorbed + int64_t(pair) * kAbsorbedRows,
                                   plan_.absorbed_rows, plan_.sums_codes, pair,
                                   scratch[plan_.scratch.factor + pair], weight_stats(scratch) + pair,
                                   outliers + n);
    return n;
}

/// Attention over stored rows that all queries of the job see.
void AttentionRun::compute_absorbed(const AttentionJob& job, Span span, float* scratch, float* state) const {
    if (span.size() == 0) return;
    prepare_absorbed(job, scratch);
    for (int64_t position = span.first, end; position < span.end; position = end) {
        end = std::min(span.end, (position / plan_.absorbed_rows + 1) * plan_.absorbed_rows);
        for (int64_t first = position, next; first < end; first = next) {
            next = std::min(end, (first / kBlockTokens + 1) * kBlockTokens);
            if (plan_.by_block) copy_biases(job, span, first, 0, 1, scratch);
            score_absorbed(job, first, next, scratch, state,
                           scratch + plan_.scratch.absorbed + first % plan_.absorbed_rows, kAbsorbedRows);
        }
        softmax_absorbed(job, position, end, scratch, state);
        const int64_t n_outliers = extract_outliers(plan_.heads_per_group * job.n_queries, scratch);
        for (size_t t = 0; t < args_.values.size(); ++t)
            absorb_values(job, t, {position, end}, plan_.heads_per_group * job.n_queries, n_outliers,
                          scratch + plan_.scratch.factor, scratch, state);
    }
}

/// Adds the values of one term for a span within absorbed_rows, for n_pairs (head, query) pairs.
void AttentionRun::absorb_values(const AttentionJob& job, size_t t, Span span, int64_t n_pairs,
                                 int64_t n_outliers, const float* factor, float* scratch,
                                 float* state) const {
    const Rows& rows = args_.values[t].stored;
    const int64_t blocks = plan_.absorbed_rows / kBlockTokens;
    AbsorbedValues values = {.type = static_cast<uint32_t>(rows.dtype),
                             .exact = plan_.exact,
                             .head_stride = head_bytes(rows.dtype, rows.head_dim()).total() * kBlockTokens,
                             .heads = rows.heads,
                             .dim = rows.head_dim(),
                             .first = span.first % plan_.absorbed_rows,
                             .n = span.size(),
                             .n_pairs = n_pairs,
                             .rows = plan_.absorbed_rows,
                             .pairs = reinterpret_cast<const int32_t*>(scratch + plan_.scratch.pairs),
                             .p = scratch + plan_.scratch.absorbed,
                             .factor = factor,
                             .outliers = reinterpret_cast<const Outlier*>(scratch + plan_.scratch.outliers),
                             .n_outliers = n_outliers,
                             .weights = scratch + plan_.scratch.absorbed_codes,
                             .out = state + plan_.state.values[t],
                             .out_stride = row_stride(args_.values[t].dim),
                             .tiles = isa_.tiles};
    const int64_t block = span.first / plan_.absorbed_rows * blocks, next = block + blocks;
    const auto at = [&](int64_t i) { return rows.base + job.sequence->table[i] * rows.block_stride; };
    for (int64_t i = span.first / kBlockTokens; i * kBlockTokens < span.end; ++i)
        values.blocks[i - block] = at(i);
    for (int64_t i = next; i < next + blocks && i * kBlockTokens < job.stored.end; ++i)
        values.next[i - next] = at(i);
    isa_.absorb_values(values);
}

}  // namespace slimrt::cpu
