// Executes an attention plan: items by any thread in any order, then the merging of split jobs.
#pragma once

#include "kernels/cpu/attention_plan.h"
#include "kernels/cpu/isa.h"

namespace slimrt::cpu {

class AttentionRun {
  public:
    AttentionRun(const Isa& isa, Access access, const AttentionArgs& args, const AttentionPlan& plan,
                 float* workspace, SparseCounts* counts)
        : isa_(isa), access_(access), args_(args), plan_(plan), workspace_(workspace), counts_(counts) {}

    /// A stretch of rows of a value term whose mean is cached.
    struct Stretch {
        const AttentionSequence& sequence;
        int64_t index;
        size_t term;
    };
    /// The stretches whose mean no call has summed yet. sum_mean(), by any thread in any order, must run
    /// before compute(), which reads them.
    std::vector<Stretch> take_unknown_means() const;
    void sum_mean(const Stretch& stretch, int thread) const;

    /// Computes a part of a job; if it is the only part, also the result.
    void compute(const AttentionItem& item, int thread) const;
    /// Merges the parts of a split job, for one of its heads.
    void merge(const AttentionJob& job, int head, int thread) const;

  private:
    struct RowView {
        const std::byte* data;
        DType dtype;
        size_t stride;  // bytes
        const std::byte* column(int64_t i) const { return data + row_bytes(dtype, i); }
        uint32_t type() const { return static_cast<uint32_t>(dtype); }
    };
    struct Tile {
        bool fresh;
        int64_t first;  // position of the first row
        int n;          // rows
    };
    /// One group of heads of a job; where its queries are in scratch, and its results in state.
    struct Group {
        const AttentionJob& job;
        int index, first_pair, n_pairs;
        float *scratch, *state;
    };

    float* scratch(int thread) const { return workspace_ + thread * plan_.scratch.size; }
    bool by_tiles(const AttentionJob& job) const;
    static TiledRows tiled_rows(const float* x, size_t x_stride, int n_x, const RowView& rows, int head,
                                int n, int64_t dim);
    void pack_queries(const AttentionJob& job, float* scratch) const;
    void compute_span(const AttentionJob& job, bool fresh, Span span, int thread, float* state) const;
    void compute_tiles(const AttentionJob& job, bool fresh, Span span, float* scratch, float* state) const;
    template <class Term>
    BlockRows rows_of(const Term& term, const AttentionJob& job, bool fresh, int64_t position, int64_t end,
                      int group) const;
    BlockAttention block_at(const AttentionJob& job, bool fresh, int64_t position, int64_t end, int group,
                            int n_groups, float* scratch, float* state) const;
    BlockRope rope_at(int64_t position, const float* scratch) const;
    void fill_rotations(float* scratch) const;
    void copy_biases(const AttentionJob& job, Span span, int64_t position, int group, int n_groups,
                     float* scratch) const;
    void compute_blocks(const AttentionJob& job, bool fresh, Span span, float* scratch, float* state) const;
    void compute_by_budget(const AttentionJob& job, Span span, float* scratch, float* state,
                           SparseCounts& counts) const;
    int64_t keep_rows(int64_t n, int first_pair, int n_q, float* scores, float* scratch, float* state) const;
    void add_kept_values(const AttentionJob& job, int group, Span span, int64_t n_kept, const float* weights,
                         float* scratch, float* state) const;
    void compute_tile(const Group& group, const Tile& tile) const;
    void compute_scores(const Group& group, const Tile& tile, size_t t, float* scores, size_t ld) const;
    void add_values(const Group& group, const Tile& tile, size_t t, const float* weights, size_t ld,
                    const float* factor) const;
    void pack_rotated_query(const ScoreTerm& term, int head, const float* q, float* to) const;
    void prepare_absorbed(const AttentionJob& job, float* scratch) const;
    void score_by_rotation(const AttentionJob& job, size_t t, int64_t position, int64_t end, float* scratch,
                           float* scores, size_t ld) const;
    void group_queries(size_t t, int pairs, float* scratch) const;
    void score_by_groups(const AttentionJob& job, size_t t, int64_t position, int64_t end, float* scratch,
                         float* scores, size_t ld) const;
    void score_absorbed(const AttentionJob& job, int64_t position, int64_t end, float* scratch, float* state,
                        float* scores, size_t ld) const;
    void softmax_absorbed(const AttentionJob& job, int64_t position, int64_t end, float* scratch,
                          float* state) const;
    WeightStats* weight_stats(float* scratch) const {
        return reinterpret_cast<WeightStats*>(scratch + plan_.scratch.weight_stats);
    }
    int64_t extract_outliers(int pairs, float* scratch) const;
    void absorb_values(const AttentionJob& job, size_t t, Span span, int64_t n_pairs, int64_t n_outliers,
                       const float* factor, float* scratch, float* state) const;
    void compute_absorbed(const AttentionJob& job, Span span, float* scratch, float* state) const;
    void compute_sparse(const AttentionJob& job, Span span, float* scratch, float* state,
                        SparseCounts& counts) const;
    void score_stretch(const AttentionJob& job, Span span, float* scratch, float* state) const;
    void skip_weights(const AttentionJob& job, Span span, float* scratch, float* state,
                      SparseCounts& counts) const;
    void add_sparse_values(const AttentionJob& job, Span span, size_t t, float* scratch, float* state) const;
    struct Listed;
    Listed listed_in(float* scratch) const;
    void list_rows(const AttentionJob& job, Span span, float* scratch) const;
    void add_listed(const Rows& rows, const ListedRows* lists, int64_t n, float* scratch) const;
    void add_dense(const AttentionJob& job, Span span, size_t t, float* scratch, float* state) const;
    float* kept_mean(const Stretch& stretch) const;
    void add_to_mean(size_t t, const int32_t* table, Span block, float weight, float* scratch,
                     float* mean) const;
    const float* bias_of(int head, int64_t distance) const;
    void softmax_tile(const Group& group, const Tile& tile) const;
    template <class Term>
    RowView read(const Group& group, const Term& term, const Tile& tile, bool copy, bool once) const;
    float factor_of(const Group& group, const ScoreTerm& term, const Tile& tile, int i, int head) const;
    RowView read_for_scores(const Group& group, const ScoreTerm& term, const Tile& tile) const;
    void finish(const AttentionJob& job, const float* states, int head, float* weights) const;

    const Isa& isa_;
    const Access access_;  // of rows that are read head by head
    const AttentionArgs& args_;
    const AttentionPlan& plan_;
    float* workspace_;
    SparseCounts* counts_;  // one for each thread
};

}  // namespace slimrt::cpu
