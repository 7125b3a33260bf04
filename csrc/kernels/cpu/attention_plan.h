// How one attention call is divided among threads. A job is a tile of queries of one sequence with some or
// all heads. If there are too few jobs, heads are divided, then the rows of a job are split into parts, whose
// results (a state: maximum, sum, values) are merged at the end, as in flash-decoding.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/backend.h"

namespace slimrt::cpu {

// Up to so many queries a job may have all heads, and so reads whole rows; where heads have rows of their
// own, up to so many (head, query) pairs of a stored head, or fewer where its rows are codes made floats.
constexpr int kFewQueries = 4, kBlockPairs = 16, kBlockPairsOfCodes = 8;

/// Positions [first, end).
struct Span {
    int64_t first = 0, end = 0;
    int64_t size() const { return end > first ? end - first : 0; }
};

struct AttentionJob {
    const AttentionSequence* sequence;
    int first_query, n_queries;  // within the sequence
    int first_group, n_groups;
    Span stored, fresh;  // positions that at least one of the queries attends to
    int n_parts;
    size_t states;  // if n_parts > 1: offset in the workspace, in floats

    int64_t work() const { return (stored.size() + fresh.size()) * n_groups; }
    int64_t position(int query) const { return sequence->position + first_query + query; }
    /// The last position that a query attends to.
    int64_t last_seen(int query) const { return sequence->causal ? position(query) : sequence->end - 1; }
};

struct AttentionItem {
    int job, part;
};

/// Offsets in floats within the scratch of a thread, which is at thread * size.
struct AttentionScratch {
    size_t q[2];        // per score term, [head][query][dim]
    size_t packed_q;    // [head][query] PackedQuery, for rows of Q8
    size_t scores;      // [head][query][tile]
    size_t rows;        // [tile][stride]
    size_t rotations;   // by_block, for keys stored before RoPE: see BlockRope
    size_t bias;        // by_block: [head][kBiasStride]
    size_t row_scores;  // by_budget, sparse_absorbed: [head][query][row], scores, then weights
    size_t keep;        // by_budget: a mark for each row that is read
    size_t kept;        // by_budget: a list of the rows that are read
    size_t skipped;     // sparse_absorbed: [head][query] the budget used so far, then the weight skipped
    size_t mean[kMaxValueTerms];  // sparse_absorbed: the mean of a stretch's rows
    size_t lists;                 // sparse_absorbed: [head][query] ListedRows
    size_t listed;                // sparse_absorbed: [head][query][kStretchRows] kListedFloats each
    size_t starts;    // sparse_absorbed: [head][query] where its list starts; last, the end; int32
    size_t dense;     // sparse_absorbed: [head][query] bits: which absorbed_rows of a stretch have no list
    size_t pairs;     // absorbs: [head][query], the pairs that are read; int32
    size_t absorbed;  // absorbs: [head][query][kAbsorbedRows], scores, then weights
    size_t absorbed_codes;                  // absorbs: scratch of absorb_values(), weight_floats()
    size_t weight_stats;                    // absorbs, sparse_absorbed: [head][query] WeightStats
    size_t ones;                            // absorbs, sparse_absorbed: [head][query] factors of 1
    size_t outliers;                        // absorbs: [head][query] kMaxOutliers Outlier each
    size_t rotated_q[2], row_rotations[2];  // per score term, see RotatedScores
    size_t first_rotation;                  // cosines, then sines of a block's first row
    size_t grouped_q[2], packed_groups[2];  // per score term, [stored head][head][query]: q, and PackedQuery
    size_t factor;                          // [head][query]
    size_t weights;                         // [part]
    size_t state;                           // the state of a job in one part
    size_t size;
};

/// Per value term [head][query][stride], then the maxima and sums [head][query].
struct AttentionState {
    size_t values[kMaxValueTerms], max, sum, size;
};

struct AttentionPlan {
    AttentionPlan(const AttentionArgs& args, int n_threads);

    /// An upper bound of `floats` for all calls with the terms of `args` whose sequences have at most as many
    /// queries and rows as the longest of args. How jobs are split depends on all sequences together, so no
    /// single call is the largest.
    static size_t max_floats(const AttentionArgs& args, int n_threads);

    /// by_budget: groups of heads whose scores are in scratch at once, with n_q queries each.
    static int groups_by_budget(int n_q) { return n_q < kRowScorePairs ? kRowScorePairs / n_q : 1; }
    static constexpr int kRowScorePairs = 16;
    bool few(int n_queries) const { return n_queries <= few_queries; }
    /// Rows whose biases are copied at once, head after head; the additional columns are for further queries.
    static constexpr int kBiasRows = 256, kBiasStride = kBiasRows + 16;

    int n_groups;                // groups of heads that share no row with other groups
    int heads_per_group;         // query heads of a group
    int tile;                    // rows read at a time
    bool packs_queries;          // queries are packed for attend_block()
    bool finishes_scores;        // scores have a soft cap or a bias
    bool by_block;               // groups read single stored heads: jobs of few queries use attend_block()
    bool by_budget;              // the same with args.sparse_threshold: values of skipped rows are not read
    bool sparse_absorbed;        // values are whole rows, and a budget skips some of them for few queries
    bool absorbs;                // values are whole rows: few queries use absorb_values()
    int few_queries;             // up to so many queries of a sequence are few
    bool rotates_query[2] = {};  // per score term: absorbs, and uses score_rotated()
    bool by_group[2] = {};       // or: absorbs, and scores are summed over the stored heads of whole rows
    bool exact;                  // absorbs: weighted sums of values in floats
    bool sums_codes;             // absorbs: values are q8 or q4, summed as codes
    int64_t absorbed_rows;       // absorbs: rows at a time, read for scores, then for values
    int64_t max_rows = 0;        // the most stored rows of a job
    size_t max_pairs = 0;        // the most (head, query) pairs of a job
    std::vector<AttentionJob> jobs;
    std::vector<AttentionItem> items;
    AttentionScratch scratch{};
    AttentionState state{};
    size_t floats;  // floats of the workspace

  private:
    struct JobShape {
        int n_groups, heads, queries;
    };
    struct Layout;

    explicit AttentionPlan(const AttentionArgs& args);
    JobShape shape(const AttentionArgs& args, const AttentionSequence& sequence, int n_queries) const;
    void add_jobs(const AttentionArgs& args, const AttentionSequence& sequence);
    void split(int n_threads);
    void repack_into(const AttentionArgs& args, size_t pairs, size_t parts);
    void lay_out_stretches(const AttentionArgs& args, Layout& layout);
    void lay_out_absorbed(const AttentionArgs& args, Layout& layout);
};

/// Floats of scratch for a listed row: two byte offsets, its position and a weight.
constexpr size_t kListedFloats = 6;

/// Floats from one row to the next in scratch: whole vectors, and not a multiple of a page, whose rows would
/// compete for the same cache sets.
inline size_t row_stride(int64_t width) { return (width + 15) / 16 * 16 + 16; }

/// Floats from the scores of one query to those of the next, for n rows.
inline size_t row_score_stride(int64_t n) { return (n + 15) / 16 * 16; }

}  // namespace slimrt::cpu
