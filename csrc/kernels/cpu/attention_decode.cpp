// Attention of few queries block by block (see attend_block()), or in two passes, where the second reads only
// values whose weights exceed a budget.
#include <algorithm>
#include <cstring>

#include "kernels/cpu/attention_run.h"
#include "kernels/cpu/row_address.h"

namespace slimrt::cpu {

/// The rows from `position` on, of the heads from `group` on, that are in one block.
template <class Term>
BlockRows AttentionRun::rows_of(const Term& term, const AttentionJob& job, bool fresh, int64_t position,
                                int64_t end, int group) const {
    const int32_t* const table = job.sequence->table;
    if (fresh) {
        const HeadRun run = rows_at(fresh_rows(term.fresh, *job.sequence), nullptr, position, end, 0);
        const size_t head = row_bytes(DType::F32, term.dim);
        return {.type = static_cast<uint32_t>(DType::F32),
                .data = run.data + group * head,
                .head_stride = head,
                .stride = run.stride,
                .dim = term.dim};
    }
    const HeadRun run = rows_at(term.stored, table, position, end, group);
    const bool more = position + run.n < end;
    return {.type = static_cast<uint32_t>(term.stored.dtype),
            .data = run.data,
            .scales = run.scales,
            .next = more ? rows_at(term.stored, table, position + run.n, end, group).data : nullptr,
            .head_stride =
                head_bytes(term.stored.dtype, term.dim, kBlockTokens, term.stored.scale_tokens).total(),
            .stride = run.stride,
            .dim = term.dim,
            .by_channel = run.by_channel};
}

/// The rotations of keys from `position` on.
BlockRope AttentionRun::rope_at(int64_t position, const float* scratch) const {
    const Rope& rope = args_.scores[0].rope;
    if (!rope) return {};
    return {rope.table.f32(position), scratch + plan_.scratch.rotations, rope.n_rot, rope.interleaved};
}

/// Rotations of rows relative to the first row of a block, which are the same for every block: the quotient
/// of two rows of the table (complex numbers), which cancels a factor common to all rows (YaRN).
void AttentionRun::fill_rotations(float* scratch) const {
    const Rope& rope = args_.scores[0].rope;
    const int64_t pairs = rope.n_rot / 2;
    const float* const first = rope.table.f32(0);
    float* to = scratch + plan_.scratch.rotations;
    for (int64_t row = 0; row < kBlockTokens; ++row, to += rope.n_rot) {
        const float* const row_rotation = rope.table.f32(row);
        for (int64_t i = 0; i < pairs; ++i) {
            const float c0 = first[2 * i], s0 = first[2 * i + 1], c = row_rotation[2 * i],
                        s = row_rotation[2 * i + 1];
            const float size = c0 * c0 + s0 * s0;
            to[i] = (c * c0 + s * s0) / size;
            to[pairs + i] = (s * c0 - c * s0) / size;
        }
    }
}

/// The block that contains `position`, up to `end`, for n_groups groups of the job from `group` on.
BlockAttention AttentionRun::block_at(const AttentionJob& job, bool fresh, int64_t position, int64_t end,
                                      int group, int n_groups, float* scratch, float* state) const {
    const ScoreTerm& score = args_.scores[0];
    const ValueTerm& value = args_.values[0];
    const int n_q = plan_.heads_per_group * job.n_queries, pair = group * n_q;
    const int head = group * plan_.heads_per_group;
    const float* const bias = scratch + plan_.scratch.bias + head * AttentionPlan::kBiasStride +
                              position % AttentionPlan::kBiasRows + job.n_queries - 1;
    const bool sums_keys = args_.values.size() > 1;
    const size_t keys_stride = sums_keys ? row_stride(args_.values[1].dim) : 0;
    const auto* packed = reinterpret_cast<const std::byte*>(scratch + plan_.scratch.packed_q);
    const int k_heads = score.n_heads / plan_.n_groups;
    return {.k = rows_of(score, job, fresh, position, end, (job.first_group + group) * k_heads),
            .v = rows_of(value, job, fresh, position, end, job.first_group + group),
            .rope = rope_at(position, scratch),
            .n = std::min(kBlockTokens - position % kBlockTokens, end - position),
            .n_heads = n_groups,
            .n_q = n_q,
            .k_heads = k_heads,
            .q = scratch + plan_.scratch.q[0] + int64_t(pair) * score.dim,
            .packed_q = plan_.packs_queries ? packed + pair * packed_query_bytes(score.dim) : nullptr,
            .scale = args_.scale,
            .score_cap = args_.score_cap,
            .bias = args_.relative_bias ? bias : nullptr,
            .bias_stride = AttentionPlan::kBiasStride,
            .n_queries = job.n_queries,
            .max = state + plan_.state.max + pair,
            .sum = state + plan_.state.sum + pair,
            .values = state + plan_.state.values[0] + pair * row_stride(value.dim),
            .values_stride = row_stride(value.dim),
            .rows = scratch + plan_.scratch.rows,
            .rows_stride = row_stride(std::max(score.dim, value.dim)),
            .access = access_,
            .keys = sums_keys ? state + plan_.state.values[1] + pair * keys_stride : nullptr,
            .keys_stride = keys_stride};
}

/// Copies the biases of some heads for the next kBiasRows rows, when the first of these is reached. In the
/// table the 32 columns of a block are on a different page for every head, which streaming rows evict from
/// the TLB; here they are adjacent. The columns before them belong to later queries.
void AttentionRun::copy_biases(const AttentionJob& job, Span span, int64_t position, int group, int n_groups,
                               float* scratch) const {
    constexpr int64_t kRows = AttentionPlan::kBiasRows;
    static_assert(kBlockPairs - 1 <= AttentionPlan::kBiasStride - kRows && kRows % kBlockTokens == 0);
    if (!args_.relative_bias || (position != span.first && position % kRows != 0)) return;
    const int64_t end = std::min(span.end, (position / kRows + 1) * kRows);
    const int64_t columns = end - position + job.n_queries - 1;
    const int first = group * plan_.heads_per_group, last = first + n_groups * plan_.heads_per_group;
    for (int head = first; head < last; ++head) {
        const float* const from = bias_of(job.first_group * plan_.heads_per_group + head,
                                          position - job.position(job.n_queries - 1));
        float* const to = scratch + plan_.scratch.bias + head * AttentionPlan::kBiasStride;
        std::memcpy(to + position % kRows, from, columns * sizeof(float));
    }
}

/// Attention over rows that all queries of the job see.
void AttentionRun::compute_blocks(const AttentionJob& job, bool fresh, Span span, float* scratch,
                                  float* state) const {
    if (args_.scores[0].rope && span.size() > 0) fill_rotations(scratch);
    for (int64_t position = span.first; position < span.end;) {
        copy_biases(job, span, position, 0, job.n_groups, scratch);
        const BlockAttention block =
            block_at(job, fresh, position, span.end, 0, job.n_groups, scratch, state);
        isa_.attend_block(block);
        position += block.n;
    }
}

/// Attention over stored rows that all queries of the job see, some groups at a time: scores and softmax of
/// all rows first, then only the values that the budget does not skip. A budget kept for each part and head
/// is kept for the whole.
void AttentionRun::compute_by_budget(const AttentionJob& job, Span span, float* scratch, float* state,
                                     SparseCounts& counts) const {
    const int64_t n = span.size();
    if (n == 0) return;
    const int n_q = plan_.heads_per_group * job.n_queries, max_groups = AttentionPlan::groups_by_budget(n_q);
    const size_t ld = row_score_stride(n);
    float* const row_scores = scratch + plan_.scratch.row_scores;
    for (int group = 0, groups; group < job.n_groups; group += groups) {
        groups = std::min(max_groups, job.n_groups - group);
        for (int64_t position = span.first; position < span.end;) {
            copy_biases(job, span, position, group, groups, scratch);
            const BlockAttention block =
                block_at(job, false, position, span.end, group, groups, scratch, state);
            isa_.score_block(block, row_scores + (position - span.first), ld);
            position += block.n;
        }
        for (int i = 0; i < groups; ++i) {
            const int64_t n_kept =
                keep_rows(n, (group + i) * n_q, n_q, row_scores + i * n_q * ld, scratch, state);
            counts.rows += n;
            counts.skipped += n - n_kept;
            add_kept_values(job, group + i, span, n_kept, row_scores + i * n_q * ld, scratch, state);
        }
    }
}

/// Softmax of the scores of n_q queries, and a list of the rows that at least one of them needs; returns its
/// length.
int64_t AttentionRun::keep_rows(int64_t n, int first_pair, int n_q, float* scores, float* scratch,
                                float* state) const {
    const int64_t dim = args_.values[0].dim;
    uint8_t* const keep = reinterpret_cast<uint8_t*>(scratch + plan_.scratch.keep);
    int32_t* const list = reinterpret_cast<int32_t*>(scratch + plan_.scratch.kept);
    std::fill_n(keep, n, uint8_t(0));
    for (int m = 0; m < n_q; ++m) {
        const int pair = first_pair + m;
        float* const weights = scores + m * row_score_stride(n);
        float* const values = state + plan_.state.values[0] + pair * row_stride(dim);
        const float factor =
            isa_.softmax(weights, n, state + plan_.state.max + pair, state + plan_.state.sum + pair);
        isa_.values(weights, 0, 1, &factor, static_cast<uint32_t>(DType::F32), values, 0, 0, dim, values,
                    0);  // no rows: multiplies values by the factor
        isa_.keep_rows(weights, n, args_.sparse_threshold, keep);
    }
    int64_t n_kept = 0;
    for (int64_t i = 0; i < n; ++i) {
        list[n_kept] = static_cast<int32_t>(i);
        n_kept += keep[i];
    }
    return n_kept;
}

/// Adds the values of listed rows, a few at a time, while the next ones are prefetched.
void AttentionRun::add_kept_values(const AttentionJob& job, int group, Span span, int64_t n_kept,
                                   const float* weights, float* scratch, float* state) const {
    const ValueTerm& term = args_.values[0];
    const HeadBytes bytes = head_bytes(term.stored.dtype, term.dim);
    const size_t head = (job.first_group + group) * bytes.total() * kBlockTokens;
    const int32_t* const list = reinterpret_cast<const int32_t*>(scratch + plan_.scratch.kept);
    const int n_q = plan_.heads_per_group * job.n_queries;
    struct Addresses {
        const void *data[kBlockTokens], *scales[kBlockTokens];
        int64_t n;
    } addresses[2];
    const auto find = [&](int64_t first) {
        Addresses& a = addresses[first / kBlockTokens % 2];
        a.n = std::min<int64_t>(kBlockTokens, n_kept - first);
        for (int64_t i = 0; i < a.n; ++i) {
            const int64_t position = span.first + list[first + i], row = position % kBlockTokens;
            const std::byte* block = term.stored.base +
                                     job.sequence->table[position / kBlockTokens] * term.stored.block_stride +
                                     head;
            const std::byte* data = block + row * bytes.elements;
            a.data[i] = data;
            a.scales[i] = block + kBlockTokens * bytes.elements + row * bytes.scales;
            prefetch(data, static_cast<int64_t>(bytes.elements), access_.hint);
            prefetch(a.scales[i], static_cast<int64_t>(bytes.scales), access_.hint);
        }
    };
    find(0);
    for (int64_t first = 0; first < n_kept; first += kBlockTokens) {
        if (first + kBlockTokens < n_kept) find(first + kBlockTokens);
        const Addresses& a = addresses[first / kBlockTokens % 2];
        isa_.add_kept_values({.type = static_cast<uint32_t>(term.stored.dtype),
                              .dim = term.dim,
                              .n = a.n,
                              .n_q = n_q,
                              .data = a.data,
                              .scales = a.scales,
                              .index = list + first,
                              .p = weights,
                              .ld = row_score_stride(span.size()),
                              .values = state + plan_.state.values[0] + group * n_q * row_stride(term.dim),
                              .values_stride = row_stride(term.dim),
                              .rows = scratch + plan_.scratch.rows,
                              .rows_stride = row_stride(term.dim)});
    }
}

}  // namespace slimrt::cpu
