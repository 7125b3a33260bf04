#include "kernels/cpu/attention_plan.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "kernels/cpu/isa.h"

namespace slimrt::cpu {
namespace {

// (head, query) pairs of a job. They share rows, which are read, made floats and transposed once; but a job
// reads all rows that its last query attends to, so that behind few rows there are fewer.
constexpr int64_t kMinPairs = 64, kMaxPairs = 256, kRowsOfPair = 16;
constexpr int64_t kMaxValueFloats = 1 << 17;  // the outputs of a job stay in L2
constexpr int64_t kTileFloats = 1 << 16;      // and so do the rows read at once
constexpr int kMinTile = 16, kMaxTile = 128;
constexpr int64_t kMinPartRows = 128;   // shorter parts cost more to merge than they save
constexpr int64_t kLongRows = 1024;     // jobs with parts as long as this are split by rows alone
constexpr int64_t kMinSliceWork = 512;  // rows times groups: less does not pay for waking a thread
constexpr int kPartsPerThread = 2;      // so that threads of different speed finish together

/// The widest head of all terms, in columns.
int64_t widest_row(const AttentionArgs& args) {
    int64_t width = 0;
    for (const ScoreTerm& term : args.scores) width = std::max<int64_t>(width, term.dim);
    for (const ValueTerm& term : args.values) width = std::max<int64_t>(width, term.dim);
    return width;
}

int common_groups(const AttentionArgs& args) {
    int groups = args.n_heads;
    for (const ScoreTerm& term : args.scores) groups = std::gcd(groups, term.n_heads);
    for (const ValueTerm& term : args.values) groups = std::gcd(groups, term.n_heads);
    return groups;
}

/// The positions of `span` that queries at [first, last] attend to.
Span visible(Span span, int64_t first, int64_t last, int64_t window) {
    if (window > 0) span.first = std::max(span.first, first - window + 1);
    span.end = std::min(span.end, last + 1);
    return span;
}

/// Whether the stored heads are the heads of the term.
template <class Term>
bool by_head(const Term& term) {
    return term.stored.heads == term.n_heads && term.stored.head_dim() == term.dim &&
           term.stored.block_tokens == kBlockTokens;
}

/// Whether queries are packed for these rows.
bool packs_for(const ScoreTerm& term) {
    const Rows& rows = term.stored;
    return rows.scale_tokens == 0 &&
           (rows.dtype == DType::Q8 || (rows.dtype == DType::Q4 && packs_four_bits(term.dim)));
}

/// Whether rows of a block can be rotated as they are read: codes with a scale for each channel.
bool rotates_by_block(const ScoreTerm& term) {
    constexpr int kWhole = 32;  // columns: whole vectors of RoPE pairs, and whole groups of codes
    return term.stored.scale_tokens == kBlockTokens && term.rope.n_rot % kWhole == 0 &&
           term.dim % kWhole == 0 && term.dim <= kMaxRotatedDim && term.rope.table.rows >= kBlockTokens;
}

/// Whether a value term is the keys of the groups themselves, which are then summed beside the values.
bool sums_keys(const ValueTerm& term, const ScoreTerm& keys, int n_groups) {
    return term.stored.base == keys.stored.base && !term.fresh && term.n_heads == n_groups &&
           keys.dim <= kMaxRotatedDim && keys.stored.width == term.n_heads * term.dim;
}

bool fits_blocks(const AttentionArgs& args, int n_groups) {
    if (args.scores.size() != 1 || args.values.size() > 2) return false;
    const ScoreTerm& score = args.scores[0];
    const ValueTerm& value = args.values[0];
    if (args.values.size() == 2 && !sums_keys(args.values[1], score, n_groups)) return false;
    return !score.row_scale && !score.bias && (!score.rope || rotates_by_block(score)) && by_head(score) &&
           score.stored.scale_tokens % kBlockTokens == 0 && value.n_heads == n_groups && by_head(value) &&
           value.stored.scale_tokens == 0;
}

/// Whether rows are in blocks with scales, if any, for each row.
bool in_blocks(const Rows& rows) { return rows.scale_tokens == 0 && rows.block_tokens == kBlockTokens; }

/// Whether rows are q8 in blocks.
bool is_q8(const Rows& rows) { return rows.dtype == DType::Q8 && in_blocks(rows); }

/// Whether every head reads whole rows, which are in blocks.
bool is_whole(const ValueTerm& term) {
    return term.n_heads == 1 && term.dim == term.stored.width && in_blocks(term.stored);
}

/// Whether few queries use absorb_values(). Not beside keys with a scale for each channel (lowrank), and not
/// where attend_block() reads rows as they are, unless they are q8.
bool absorbs_rows(const AttentionArgs& args, bool by_block) {
    for (const ScoreTerm& term : args.scores)
        if (term.stored.scale_tokens) return false;
    return std::ranges::all_of(args.values, is_whole) && (!by_block || is_q8(args.values[0].stored));
}

/// Whether queries can be rotated for score_rotated().
bool rotates_queries(const ScoreTerm& term) {
    const Rows& rows = term.stored;
    return in_blocks(rows) && term.n_heads > 1 && !term.bias && term.dim <= kMaxRotatedDim &&
           (rows.heads == 1 || (rows.heads == term.n_heads && rows.head_dim() == term.dim)) &&
           (!term.rope || term.rope.table.rows >= kBlockTokens);
}

/// Whether scores are products with whole q8 rows as they are stored.
bool sums_groups(const ScoreTerm& term) {
    return is_q8(term.stored) && term.n_heads == 1 && term.dim == term.stored.width && !term.row_scale &&
           !term.bias && !term.rope;
}

bool is_codes(const ValueTerm& term) {
    return term.stored.dtype == DType::Q8 || term.stored.dtype == DType::Q4;
}

/// How many whole rows are summed at a time. With twice as many, the outputs are read and written half as
/// often: 8 bytes for each head and column, as much as the rows themselves (one byte) with 32 heads. With
/// fewer heads it only takes space in L1; rows of other types are larger, and become floats or int16 there.
int64_t rows_together(const AttentionArgs& args) {
    constexpr int64_t kOutBytes = 2 * sizeof(float);
    const bool pays = kOutBytes * args.n_heads >= kAbsorbedRows;
    return pays && std::ranges::all_of(args.values, is_codes) ? kAbsorbedRows : kAbsorbedRows / 2;
}

/// The rows of a sequence, old and new.
int64_t rows_of(const AttentionSequence& sequence) {
    return sequence.end - sequence.begin + (sequence.fresh ? sequence.n_queries : 0);
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// How many equal shares the work is divided into.
int64_t shares_of(int n_threads) { return n_threads == 1 ? 1 : int64_t(n_threads) * kPartsPerThread; }

}  // namespace

/// Hands out consecutive parts of memory, in floats, each from a cache line on.
struct AttentionPlan::Layout {
    size_t end = 0;

    size_t take(size_t floats) { return std::exchange(end, end + (floats + 15) / 16 * 16); }
};

AttentionPlan::AttentionPlan(const AttentionArgs& args)
    : n_groups(common_groups(args)),
      heads_per_group(args.n_heads / n_groups),
      packs_queries(fits_blocks(args, n_groups) && packs_for(args.scores[0])),
      finishes_scores(args.score_cap > 0 || args.relative_bias),
      by_block(fits_blocks(args, n_groups)),
      by_budget(by_block && args.sparse_threshold > 0 && args.scores[0].n_heads == n_groups),
      sparse_absorbed((args.sparse_threshold > 0 || args.sparse_delta > 0) && !by_budget &&
                      std::ranges::all_of(args.values, is_whole)),
      absorbs(absorbs_rows(args, by_block) && !by_budget),
      exact(args.corrected && args.values[0].stored.dtype != DType::Q8),
      sums_codes(is_codes(args.values[0]) && !exact),
      absorbed_rows(rows_together(args)) {
    const DType type = args.scores[0].stored.dtype;
    const bool as_stored = is_float(type) || (packs_queries && type == DType::Q8);
    const int pairs = as_stored ? kBlockPairs : kBlockPairsOfCodes;
    few_queries = by_block && !by_budget ? std::max(kFewQueries, pairs / heads_per_group) : kFewQueries;
    for (size_t i = 0; i < args.scores.size(); ++i) {
        rotates_query[i] = absorbs && rotates_queries(args.scores[i]);
        by_group[i] = absorbs && !by_block && sums_groups(args.scores[i]);
    }
}

AttentionPlan::AttentionPlan(const AttentionArgs& args, int n_threads) : AttentionPlan(args) {
    for (const AttentionSequence& sequence : args.sequences) add_jobs(args, sequence);
    split(n_threads);
    size_t pairs = 0;  // (head, query)
    int parts = 0;
    for (const AttentionJob& job : jobs) {
        pairs = std::max<size_t>(pairs, job.n_groups * heads_per_group * job.n_queries);
        parts = std::max(parts, job.n_parts);
        max_rows = std::max(max_rows, job.stored.size());
    }
    repack_into(args, pairs, parts);
    floats = scratch.size * n_threads;
    for (AttentionJob& job : jobs) {
        if (job.n_parts > 1) job.states = std::exchange(floats, floats + job.n_parts * state.size);
    }
}

size_t AttentionPlan::max_floats(const AttentionArgs& args, int n_threads) {
    int64_t rows = 0;
    AttentionPlan plan(args);
    size_t pairs = 0;
    for (const AttentionSequence& s : args.sequences) {
        rows = std::max(rows, rows_of(s));
        for (const int n : {std::min(s.n_queries, plan.few_queries), s.n_queries}) {
            const JobShape job = plan.shape(args, s, n);
            pairs = std::max<size_t>(pairs, job.heads * std::min(job.queries, n));
        }
    }
    // All jobs together are shares_of() shares. A job of G groups and w > 1 shares is split by rows only into
    // more than G pieces, fewer than w + 1 rounded up to a multiple of G: fewer than 2 w if G is 1; else, as
    // G + 1 >= 3 pieces mean w > 2, fewer than 2 (w + 1) < 3 w. A long job is split by rows alone, into fewer
    // than w + 1 < 2 w.
    const int64_t shares = rows > kMinPartRows ? shares_of(n_threads) : 1;
    const int64_t per_share = plan.n_groups == 1 ? 2 : 3;
    plan.max_rows = rows;
    plan.repack_into(args, pairs, per_share * shares);
    return plan.scratch.size * n_threads + (shares == 1 ? 0 : (per_share * shares - 1) * plan.state.size);
}

/// The shape of jobs of a sequence with n_queries queries: all groups in one job or one each, and the most
/// queries of a job.
AttentionPlan::JobShape AttentionPlan::shape(const AttentionArgs& args, const AttentionSequence& sequence,
                                             int n_queries) const {
    const int groups = few(n_queries) ? n_groups : 1, heads = groups * heads_per_group;
    const int64_t max_queries = std::max<int64_t>(1, kMaxValueFloats / (heads * widest_row(args)));
    const int64_t behind = sequence.causal ? rows_of(sequence) / kRowsOfPair : kMaxPairs;
    const int64_t pairs = std::clamp(behind, kMinPairs, kMaxPairs);
    const int64_t queries = few(n_queries) ? n_queries : std::max<int64_t>(1, pairs / heads);
    return {groups, heads, static_cast<int>(std::min(queries, max_queries))};
}

/// The last queries come first: they attend to the most rows.
void AttentionPlan::add_jobs(const AttentionArgs& args, const AttentionSequence& sequence) {
    const int n = sequence.n_queries;
    if (n == 0) return;
    const auto [groups_of_job, heads, queries] = shape(args, sequence, n);
    for (int tile = (n + queries - 1) / queries; tile-- > 0;) {
        AttentionJob job{};
        job.sequence = &sequence;
        job.first_query = tile * queries;
        job.n_queries = std::min(queries, n - job.first_query);
        job.n_groups = groups_of_job;
        const int64_t first = job.position(0), last = job.last_seen(job.n_queries - 1);
        job.stored = visible({sequence.begin, sequence.end}, first, last, args.window);
        if (sequence.fresh) {
            job.fresh = visible({sequence.position, sequence.position + n}, first, last, args.window);
        }
        for (job.first_group = 0; job.first_group < n_groups; job.first_group += groups_of_job)
            jobs.push_back(job);
    }
}

/// Splits long jobs until the largest piece is a fair share of all work: first by groups, whose results need
/// no merging, then by rows. Jobs with many rows are split by rows alone: a thread then reads whole blocks in
/// the order of memory, which is worth a merge.
void AttentionPlan::split(int n_threads) {
    int64_t total = 0;
    for (const AttentionJob& job : jobs) total += job.work();
    const int64_t share = std::max<int64_t>(1, ceil_div(total, shares_of(n_threads)));
    // GQA over q8 is limited by arithmetic, whose operands stay in the caches while a thread has few heads.
    const bool in_order = heads_per_group == 1 || !packs_queries;
    std::vector<AttentionJob> slices;
    for (AttentionJob job : jobs) {
        const int64_t rows = job.stored.size() + job.fresh.size();
        const int64_t pieces = std::max<int64_t>(1, ceil_div(job.work(), share));
        const int64_t max_pieces = std::min(pieces, std::max<int64_t>(1, job.work() / kMinSliceWork));
        const int end = job.first_group + job.n_groups;
        const bool is_long = in_order && rows >= kLongRows * pieces;
        const int groups =
            is_long ? job.n_groups
                    : static_cast<int>(ceil_div(job.n_groups, std::min<int64_t>(job.n_groups, max_pieces)));
        job.n_parts = 1;
        if (groups == 1 || is_long) {
            const int64_t parts = is_long ? pieces : ceil_div(pieces, job.n_groups);
            job.n_parts = static_cast<int>(
                std::clamp<int64_t>(parts, 1, std::max<int64_t>(1, ceil_div(rows, kMinPartRows))));
        }
        for (; job.first_group < end; job.first_group += groups) {
            job.n_groups = std::min(groups, end - job.first_group);
            for (int part = 0; part < job.n_parts; ++part)
                items.push_back({static_cast<int>(slices.size()), part});
            slices.push_back(job);
        }
    }
    jobs = std::move(slices);
}

/// Lays out scratch and state for at most this many (head, query) pairs and parts of a job.
void AttentionPlan::repack_into(const AttentionArgs& args, size_t pairs, size_t parts) {
    int64_t width = 1;  // the most columns of a group
    const auto widen_for = [&](const auto& term) {
        width = std::max<int64_t>(width, int64_t(term.n_heads) / n_groups * term.dim);
    };
    for (const ScoreTerm& term : args.scores) widen_for(term);
    for (const ValueTerm& term : args.values) widen_for(term);
    tile = std::clamp<int64_t>(kTileFloats / width / kMinTile * kMinTile, kMinTile, kMaxTile);

    max_pairs = pairs;
    Layout of_state;
    for (size_t i = 0; i < args.values.size(); ++i)
        state.values[i] = of_state.take(pairs * row_stride(args.values[i].dim));
    state.max = of_state.take(pairs);
    state.sum = of_state.take(pairs);
    state.size = of_state.end;

    Layout layout;
    for (size_t i = 0; i < args.scores.size(); ++i) scratch.q[i] = layout.take(pairs * args.scores[i].dim);
    if (packs_queries)
        scratch.packed_q = layout.take(pairs * packed_query_bytes(args.scores[0].dim) / sizeof(float));
    scratch.scores = layout.take(pairs * tile);
    scratch.rows = layout.take(std::max<int64_t>(tile, by_block || sparse_absorbed ? kBlockTokens : 0) *
                               row_stride(width));
    if (by_block && args.scores[0].rope)
        scratch.rotations = layout.take(kBlockTokens * size_t(args.scores[0].rope.n_rot));
    if (by_block && args.relative_bias) scratch.bias = layout.take(size_t(args.n_heads) * kBiasStride);
    if (by_budget) {
        scratch.row_scores =
            layout.take(std::max(kRowScorePairs, kFewQueries * heads_per_group) * row_score_stride(max_rows));
        scratch.keep = layout.take(max_rows / sizeof(float) + 1);
        scratch.kept = layout.take(max_rows + 1);
    }
    if (sparse_absorbed) lay_out_stretches(args, layout);
    if (sparse_absorbed || absorbs) {
        scratch.weight_stats = layout.take(pairs * sizeof(WeightStats) / sizeof(float));
        scratch.ones = layout.take(pairs);
    }
    if (absorbs) lay_out_absorbed(args, layout);
    scratch.factor = layout.take(pairs);
    scratch.weights = layout.take(parts);
    scratch.state = layout.take(state.size);
    scratch.size = layout.end;
}

/// Scratch of sparse_absorbed.
void AttentionPlan::lay_out_stretches(const AttentionArgs& args, Layout& layout) {
    scratch.row_scores = layout.take(max_pairs * kStretchStride);
    scratch.skipped = layout.take(2 * max_pairs);
    for (size_t i = 0; i < args.values.size(); ++i)
        scratch.mean[i] = layout.take(row_stride(args.values[i].dim));
    scratch.lists = layout.take((max_pairs + 1) * sizeof(ListedRows) / sizeof(float));
    scratch.listed = layout.take((max_pairs + 1) * kStretchRows * kListedFloats);
    scratch.starts = layout.take(max_pairs + 1);
    scratch.dense = layout.take(max_pairs);
}

/// Scratch of absorb_values() and of the scores beside it.
void AttentionPlan::lay_out_absorbed(const AttentionArgs& args, Layout& layout) {
    int64_t widest = 0;
    scratch.absorbed = layout.take(max_pairs * kAbsorbedRows);
    scratch.absorbed_codes = layout.take(weight_floats(max_pairs));
    scratch.pairs = layout.take(max_pairs);
    scratch.outliers = layout.take(max_pairs * kMaxOutliers * sizeof(Outlier) / sizeof(float));
    for (size_t i = 0; i < args.scores.size(); ++i) {
        const int64_t dim = args.scores[i].dim;
        if (by_group[i]) {
            const Rows& rows = args.scores[i].stored;
            const size_t packed = packed_query_bytes(rows.head_dim()) / sizeof(float);
            scratch.grouped_q[i] = layout.take(max_pairs * dim);
            scratch.packed_groups[i] = layout.take(max_pairs * rows.heads * packed);
        }
        if (!rotates_query[i]) continue;
        widest = std::max(widest, rotated_dim(dim));
        scratch.rotated_q[i] = layout.take(max_pairs * rotated_query_floats(dim));
        scratch.row_rotations[i] = layout.take(row_rotation_floats(is_q8(args.scores[i].stored), dim));
    }
    scratch.first_rotation = layout.take(2 * widest);
}

}  // namespace slimrt::cpu
