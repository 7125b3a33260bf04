// How one attention call is shared out. A job is a tile of queries of one sequence with some or all of the
// heads; where there are fewer jobs than threads would like, heads are shared out, then the rows a job reads
// are split into parts, whose results (maximum, sum, values: a state) are merged at the end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/backend.h"

namespace slimrt::cpu {

constexpr int kFewQueries = 4;  // up to here a job may have many heads, and so reads whole rows

/// Positions [first, end).
struct Span {
    int64_t first = 0, end = 0;
    int64_t size() const { return end > first ? end - first : 0; }
};

struct AttentionJob {
    const AttentionSequence* sequence;
    int first_query, n_queries;  // within the sequence
    int first_group, n_groups;
    Span stored, fresh;  // positions that at least one of the queries sees
    int n_parts;
    size_t states;  // of n_parts > 1: where they are in the workspace, in floats

    int64_t work() const { return (stored.size() + fresh.size()) * n_groups; }
    int64_t position(int query) const { return sequence->position + first_query + query; }
    /// The position that a query sees last.
    int64_t last_seen(int query) const { return sequence->causal ? position(query) : sequence->end - 1; }
};

struct AttentionItem {
    int job, part;
};

/// Offsets in floats. Every thread has its scratch at thread * size.
struct AttentionScratch {
    size_t q[2];       // per score term, [head][query][dim]
    size_t packed_q;   // [head][query] PackedQuery, where rows are Q8
    size_t scores;     // [head][query][tile]
    size_t rows;       // [tile][stride]
    size_t rotations;  // by_block, of keys that are turned: see BlockRope
    size_t bias;       // by_block: [head][kBiasStride]
    size_t spread;     // by_budget, spares: [head][query][row of the longest job, or of a stretch],
                       // scores, then weights
    size_t keep;       // by_budget: a mark for each row
    size_t kept;       // by_budget: a list of rows
    size_t skipped;    // spares: [head][query] what is used of the budget, then the mass passed over
    size_t mean[kMaxValueTerms];  // spares: of a stretch's rows
    size_t lists;                 // spares: a ListedRows of each [head][query]
    size_t listed;                // spares: kListedFloats of each [head][query][kStretchRows]
    size_t starts;                // spares: of the list of each [head][query] and, last, the end, as integers
    size_t dense;     // spares: [head][query], as an integer, which absorbed_rows of a stretch have no list
    size_t pairs;     // absorbs: [head][query], which are read
    size_t absorbed;  // absorbs: [head][query][kAbsorbedRows], scores, then weights
    size_t absorbed_codes;                  // weight_floats()
    size_t weight_stats;                    // absorbs, spares: WeightStats of each [head][query]
    size_t ones;                            // absorbs, spares: [head][query], factors
    size_t outliers;                        // Outlier, of each [head][query] kMaxOutliers
    size_t rotated_q[2], row_rotations[2];  // per score term, see RotatedScores
    size_t first_rotation;
    size_t grouped_q[2], packed_groups[2];  // per score term, [stored head][head][query]: q, and PackedQuery
    size_t factor;                          // [head][query]
    size_t weights;                         // [part]
    size_t state;                           // of a job in one part
    size_t size;
};

/// Per value term [head][query][stride], then the maxima and sums [head][query].
struct AttentionState {
    size_t values[kMaxValueTerms], max, sum, size;
};

struct AttentionPlan {
    AttentionPlan(const AttentionArgs& args, int n_threads);

    /// At least the `floats` of any call with the terms of `args` whose sequences each have no more queries
    /// and rows than the longest of args'. How often jobs are split depends on all sequences together, so no
    /// single call is the largest.
    static size_t max_floats(const AttentionArgs& args, int n_threads);

    /// Groups of heads whose scores are held at once by budget, with n_q queries each.
    static int groups_by_budget(int n_q) { return n_q < kSpreadPairs ? kSpreadPairs / n_q : 1; }
    static constexpr int kSpreadPairs = 16;
    /// Rows whose biases are copied at once, head after head; a head has more columns for more queries.
    static constexpr int kBiasRows = 256, kBiasStride = kBiasRows + 16;

    int n_groups;          // what the heads divide into without sharing a row between groups
    int heads_per_group;   // query heads
    int tile;              // rows read at once
    bool packs_queries;    // attend_block() wants them so
    bool finishes_scores;  // by a cap or a bias
    bool by_block;         // stored heads are what a group reads: jobs of few queries take attend_block()
    bool by_budget;        // or, with args.sparse_threshold, read few values
    bool sparse_absorbed;  // all values are whole rows, and a budget spares some of few queries
    bool absorbs;          // values are whole rows: few queries take absorb_values()
    bool rotates_query[2] = {};  // per score term: absorbs, and takes score_rotated()
    bool by_group[2] = {};       // or: absorbs, and scores are sums over the stored heads of whole rows
    bool exact;                  // absorbs: values are summed as floats
    bool sums_codes;             // absorbs: rows of codes, or of 4 bits
    int64_t absorbed_rows;       // absorbs: so many at a time, read for scores, then for values
    int64_t max_rows = 0;        // stored rows of a job
    size_t max_pairs = 0;        // (head, query) of a job
    std::vector<AttentionJob> jobs;
    std::vector<AttentionItem> items;
    AttentionScratch scratch{};
    AttentionState state{};
    size_t floats;  // of workspace

  private:
    struct JobShape {
        int n_groups, heads, queries;
    };

    explicit AttentionPlan(const AttentionArgs& args);
    JobShape shape(const AttentionArgs& args, int n_queries) const;
    void add_jobs(const AttentionArgs& args, const AttentionSequence& sequence);
    void split(int n_threads);
    void repack_into(const AttentionArgs& args, size_t pairs, size_t parts);
};

/// Floats that a listed row takes: two addresses, its position and a weight.
constexpr size_t kListedFloats = 6;

/// Floats from one row to the next in scratch: whole vectors, and not a multiple of a page, whose rows would
/// all compete for the same few places of the cache.
inline size_t row_stride(int64_t width) { return (width + 15) / 16 * 16 + 16; }

/// Floats from the scores of one query for n rows to those of the next.
inline size_t spread_stride(int64_t n) { return (n + 15) / 16 * 16; }

}  // namespace slimrt::cpu
