// Sparse attention of few queries over absorbed rows: values whose softmax weights add up to less than a
// budget are not read. A stretch of rows at a time, the newest first, which often have most of the weight.
// The denominator only grows, so a budget that holds for the rows so far holds in the end.
#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/cpu/attention_run.h"
#include "kernels/cpu/row_address.h"

namespace slimrt::cpu {
namespace {

/// From this share of rows on a pair reads all of absorbed_rows: listed rows are transposed for one pair
/// alone (AVX-512: 20 instructions for 4 rows and 64 columns), the others once for all pairs (4, and 1 - 2
/// loads), and listed rows are read again for each pair from wherever they are by then.
constexpr double kDenseShare = 0.2;

/// Rows added to a mean at a time, over all columns: the lines of more rows, pages apart, would compete for
/// one set of L1.
constexpr int64_t kRowsOfMean = 8;

constexpr int64_t kScanned = 16;  // weights tested at a time

bool all_zero(const float* p) {
    uint64_t bits[kScanned / 2], any = 0;
    std::memcpy(bits, p, sizeof bits);
    for (const uint64_t two : bits) any |= two;
    return any == 0;
}

int32_t zeros(const float* p, int64_t n) {
    int32_t found = 0;
    for (int64_t i = 0; i < n; ++i) found += p[i] == 0;
    return found;
}

}  // namespace

/// The arrays of listed rows.
struct AttentionRun::Listed {
    int64_t *data, *scales;
    int32_t* positions;
    float* weights;

    void set(int64_t i, int64_t position, float weight) const {
        positions[i] = static_cast<int32_t>(position);
        weights[i] = weight;
    }
    void find(int64_t i, const Rows& rows, const int32_t* table) const {
        const HeadBytes bytes = head_bytes(rows.dtype, rows.head_dim());
        const int64_t row = positions[i] % kBlockTokens;
        const int64_t block = table[positions[i] / kBlockTokens] * int64_t(rows.block_stride);
        data[i] = block + row * int64_t(bytes.elements);
        scales[i] = block + kBlockTokens * int64_t(bytes.elements) + row * int64_t(bytes.scales);
    }
    ListedRows list(int64_t first, int64_t end, float* out) const {
        return {data + first, scales + first, weights + first, end - first, out};
    }
};

void AttentionRun::compute_sparse(const AttentionJob& job, Span span, float* scratch, float* state,
                                  SparseCounts& counts) const {
    if (span.size() == 0) return;
    prepare_absorbed(job, scratch);
    std::fill_n(scratch + plan_.scratch.skipped, plan_.heads_per_group * job.n_queries, 0.0f);
    for (int64_t end = span.end, first; end > span.first; end = first) {
        first = std::max(span.first, (end - 1) / kStretchRows * kStretchRows);
        score_stretch(job, {first, end}, scratch, state);
        skip_weights(job, {first, end}, scratch, state, counts);
        list_rows(job, {first, end}, scratch);
        for (size_t t = 0; t < args_.values.size(); ++t)
            add_sparse_values(job, {first, end}, t, scratch, state);
    }
}

/// Scores of a stretch and, unless it is cached, the mean of its rows while they are in the caches.
void AttentionRun::score_stretch(const AttentionJob& job, Span span, float* scratch, float* state) const {
    for (size_t t = 0; t < args_.values.size(); ++t)
        std::fill_n(scratch + plan_.scratch.mean[t], args_.values[t].dim, 0.0f);
    for (int64_t first = span.first, next; first < span.end; first = next) {
        next = std::min(span.end, (first / kBlockTokens + 1) * kBlockTokens);
        if (plan_.by_block) copy_biases(job, span, first, 0, 1, scratch);
        score_absorbed(job, first, next, scratch, state,
                       scratch + plan_.scratch.row_scores + first % kStretchRows, kStretchStride);
        for (size_t t = 0; t < args_.values.size(); ++t)
            if (!kept_mean({*job.sequence, span.first / kStretchRows, t}))
                add_to_mean(t, job.sequence->table, {first, next}, 1 / static_cast<float>(span.size()),
                            scratch, scratch + plan_.scratch.mean[t]);
    }
}

void AttentionRun::add_to_mean(size_t t, const int32_t* table, Span block, float weight, float* scratch,
                               float* mean) const {
    const Rows& rows = args_.values[t].stored;
    const Listed listed = listed_in(scratch);
    const int64_t n = block.size();
    for (int64_t i = 0; i < n; ++i) {
        listed.set(i, block.first + i, weight);
        listed.find(i, rows, table);
    }
    ListedRows lists[kBlockTokens / kRowsOfMean];
    int64_t n_lists = 0;
    for (int64_t i = 0; i < n; i += kRowsOfMean)
        lists[n_lists++] = listed.list(i, std::min(n, i + kRowsOfMean), mean);
    add_listed(rows, lists, n_lists, scratch);
}

/// Where the mean of a stretch is cached, or will be once it is summed; nullptr: it is not cached.
float* AttentionRun::kept_mean(const Stretch& stretch) const {
    const std::span<const int32_t> means = stretch.sequence.means;
    const bool kept = stretch.index < std::ssize(means) && means[stretch.index] >= 0;
    const StretchMeans& of_term = args_.values[stretch.term].stored.means;
    return kept && of_term.base ? of_term.mean(means[stretch.index]) : nullptr;
}

/// Forks share means: each is returned once.
std::vector<AttentionRun::Stretch> AttentionRun::take_unknown_means() const {
    std::vector<Stretch> unknown;
    if (!plan_.sparse_absorbed) return unknown;
    for (const AttentionSequence& sequence : args_.sequences)
        for (size_t t = 0; t < args_.values.size(); ++t)
            for (int64_t i = 0; i < std::ssize(sequence.means); ++i) {
                const Stretch stretch{sequence, i, t};
                if (!kept_mean(stretch)) continue;
                uint8_t& known = args_.values[t].stored.means.known[sequence.means[i]];
                if (!std::exchange(known, 1)) unknown.push_back(stretch);
            }
    return unknown;
}

void AttentionRun::sum_mean(const Stretch& stretch, int thread) const {
    float* const mean = kept_mean(stretch);
    std::fill_n(mean, args_.values[stretch.term].dim, 0.0f);
    const int64_t end = (stretch.index + 1) * kStretchRows;
    for (int64_t first = stretch.index * kStretchRows; first < end; first += kBlockTokens)
        add_to_mean(stretch.term, stretch.sequence.table, {first, first + kBlockTokens}, 1.0f / kStretchRows,
                    scratch(thread), mean);
}

/// Softmax of the scores of a stretch; weights that the budget skips become 0.
void AttentionRun::skip_weights(const AttentionJob& job, Span span, float* scratch, float* state,
                                SparseCounts& counts) const {
    const int pairs = plan_.heads_per_group * job.n_queries;
    const int64_t n = span.size();
    const bool squared = args_.sparse_delta > 0;
    for (int pair = 0; pair < pairs; ++pair) {
        float* const s =
            scratch + plan_.scratch.row_scores + pair * kStretchStride + span.first % kStretchRows;
        float* const used = scratch + plan_.scratch.skipped + pair;
        float* const sum = state + plan_.state.sum + pair;
        if (plan_.finishes_scores && !plan_.by_block)
            isa_.finish_scores(
                s, n, args_.score_cap,
                bias_of(pair / job.n_queries, span.first - job.position(pair % job.n_queries)));
        const float factor = isa_.softmax(s, n, state + plan_.state.max + pair, sum);
        for (size_t t = 0; t < args_.values.size() && factor != 1; ++t) {
            const int64_t dim = args_.values[t].dim;
            float* const values = state + plan_.state.values[t] + pair * row_stride(dim);
            isa_.values(s, 0, 1, &factor, static_cast<uint32_t>(DType::F32), values, 0, 0, dim, values, 0);
        }
        WeightStats& stats = weight_stats(scratch)[pair];
        stats = {stats.squares * factor * factor, stats.largest * factor * factor, stats.rows};
        *used *= squared ? factor * factor : factor;
        const float share = squared ? args_.sparse_delta * *sum : args_.sparse_threshold * *sum;
        const SkippedWeights skipped =
            isa_.skip_weights(s, n, (squared ? share * share : share) - *used, squared);
        *used += skipped.used;
        used[pairs] = skipped.mass;
        counts.skipped += zeros(s, n);
    }
    counts.rows += n * pairs;
}

AttentionRun::Listed AttentionRun::listed_in(float* scratch) const {
    const size_t places = (plan_.max_pairs + 1) * kStretchRows;
    int64_t* const data = reinterpret_cast<int64_t*>(scratch + plan_.scratch.listed);
    int32_t* const positions = reinterpret_cast<int32_t*>(data + 2 * places);
    return {data, data + places, positions, reinterpret_cast<float*>(positions + places)};
}

/// Lists the rows of each pair that have weight; marks the absorbed_rows with too many for a list.
void AttentionRun::list_rows(const AttentionJob& job, Span span, float* scratch) const {
    const int pairs = plan_.heads_per_group * job.n_queries;
    const Listed listed = listed_in(scratch);
    int32_t* const starts = reinterpret_cast<int32_t*>(scratch + plan_.scratch.starts);
    int32_t* const dense = reinterpret_cast<int32_t*>(scratch + plan_.scratch.dense);
    int64_t to = 0;
    for (int pair = 0; pair < pairs; ++pair) {
        const float* const p = scratch + plan_.scratch.row_scores + pair * kStretchStride;
        starts[pair] = static_cast<int32_t>(to);
        dense[pair] = 0;
        for (int64_t first = span.first, end; first < span.end; first = end) {
            end = std::min(span.end, (first / plan_.absorbed_rows + 1) * plan_.absorbed_rows);
            const float* const some = p + first % kStretchRows;
            const int64_t n = end - first;
            if (plan_.absorbs && n - zeros(some, n) > kDenseShare * plan_.absorbed_rows) {
                dense[pair] |= 1 << first % kStretchRows / plan_.absorbed_rows;
                continue;
            }
            for (int64_t i = 0, next; i < n; i = next) {
                next = std::min(n, i + kScanned);
                if (next - i == kScanned && all_zero(some + i)) continue;
                for (; i < next; ++i) {  // branch-free: the branch would be unpredictable
                    listed.set(to, first + i, some[i]);
                    to += some[i] != 0;
                }
            }
        }
    }
    starts[pairs] = static_cast<int32_t>(to);
}

void AttentionRun::add_listed(const Rows& rows, const ListedRows* lists, int64_t n, float* scratch) const {
    isa_.add_listed_values({.type = static_cast<uint32_t>(rows.dtype),
                            .base = rows.base,
                            .head_stride = head_bytes(rows.dtype, rows.head_dim()).total() * kBlockTokens,
                            .heads = rows.heads,
                            .dim = rows.head_dim(),
                            .n_lists = n,
                            .lists = lists,
                            .rows = scratch + plan_.scratch.rows,
                            .rows_stride = row_stride(rows.head_dim())});
}

void AttentionRun::add_sparse_values(const AttentionJob& job, Span span, size_t t, float* scratch,
                                     float* state) const {
    const int pairs = plan_.heads_per_group * job.n_queries;
    const size_t stride = row_stride(args_.values[t].dim);
    ListedRows* const lists = reinterpret_cast<ListedRows*>(scratch + plan_.scratch.lists);
    const int32_t* const starts = reinterpret_cast<const int32_t*>(scratch + plan_.scratch.starts);
    const Listed listed = listed_in(scratch);
    for (int64_t i = 0; i < starts[pairs]; ++i) listed.find(i, args_.values[t].stored, job.sequence->table);
    int n_lists = 0;
    for (int pair = 0; pair < pairs; ++pair)
        if (starts[pair + 1] > starts[pair])
            lists[n_lists++] =
                listed.list(starts[pair], starts[pair + 1], state + plan_.state.values[t] + pair * stride);
    add_listed(args_.values[t].stored, lists, n_lists, scratch);
    if (plan_.absorbs) add_dense(job, span, t, scratch, state);
    // The skipped weight times the mean of the rows of the stretch.
    const float* const kept = kept_mean({*job.sequence, span.first / kStretchRows, t});
    isa_.values(scratch + plan_.scratch.skipped + pairs, 1, pairs, scratch + plan_.scratch.ones,
                static_cast<uint32_t>(DType::F32), kept ? kept : scratch + plan_.scratch.mean[t], 0, 1,
                args_.values[t].dim, state + plan_.state.values[t], stride);
}

/// Adds absorbed_rows that are not listed, for the pairs they are not listed for.
void AttentionRun::add_dense(const AttentionJob& job, Span span, size_t t, float* scratch,
                             float* state) const {
    const int pairs = plan_.heads_per_group * job.n_queries;
    int32_t* const dense = reinterpret_cast<int32_t*>(scratch + plan_.scratch.dense);
    int32_t* const read = reinterpret_cast<int32_t*>(scratch + plan_.scratch.pairs);
    Outlier* const outliers = reinterpret_cast<Outlier*>(scratch + plan_.scratch.outliers);
    for (int64_t first = span.first, end; first < span.end; first = end) {
        end = std::min(span.end, (first / plan_.absorbed_rows + 1) * plan_.absorbed_rows);
        int n_pairs = 0;
        int64_t n_outliers = 0;
        for (int pair = 0; pair < pairs; ++pair) {
            if (!(dense[pair] & 1 << first % kStretchRows / plan_.absorbed_rows)) continue;
            float* const p = scratch + plan_.scratch.absorbed + n_pairs * kAbsorbedRows;
            std::fill_n(p, plan_.absorbed_rows, 0.0f);
            std::memcpy(p + first % plan_.absorbed_rows,
                        scratch + plan_.scratch.row_scores + pair * kStretchStride + first % kStretchRows,
                        (end - first) * sizeof(float));
            WeightStats stats = weight_stats(scratch)[pair];
            n_outliers += isa_.extract_outliers(p, plan_.absorbed_rows, plan_.sums_codes, pair, 1, &stats,
                                                outliers + n_outliers);
            // Every term starts from the same statistics.
            if (t + 1 == args_.values.size()) weight_stats(scratch)[pair] = stats;
            read[n_pairs++] = pair;
        }
        if (n_pairs > 0)
            absorb_values(job, t, {first, end}, n_pairs, n_outliers, scratch + plan_.scratch.ones, scratch,
                          state);
    }
}

}  // namespace slimrt::cpu
