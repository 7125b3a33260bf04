// One attention call at work: the items of a plan, any thread, any order; then the jobs that were split.
#pragma once

#include "kernels/cpu/attention_plan.h"
#include "kernels/cpu/isa.h"

namespace slimrt::cpu {

class AttentionRun {
  public:
    AttentionRun(const Isa& isa, const AttentionArgs& args, const AttentionPlan& plan, float* workspace)
        : isa_(isa), args_(args), plan_(plan), workspace_(workspace) {}

    /// Computes a part of a job and, of a job in one part, the result.
    void compute(const AttentionItem& item, int thread) const;
    /// Merges the parts of a split job, for one of its heads.
    void merge(const AttentionJob& job, int head, int thread) const;

  private:
    struct RowView {
        const float* data;
        size_t stride;
    };
    struct Tile {
        bool fresh;
        int64_t first;  // position
        int n;
    };

    float* scratch(int thread) const { return workspace_ + thread * plan_.scratch.size; }
    void pack_queries(const AttentionJob& job, float* scratch) const;
    void compute_span(const AttentionJob& job, bool fresh, Span span, float* scratch, float* state) const;
    void compute_tile(const AttentionJob& job, const Tile& tile, float* scratch, float* state) const;
    void weigh(const AttentionJob& job, const Tile& tile, float* scratch, float* state) const;
    RowView read(const AttentionJob& job, const Rows& rows, const Tile& tile, int first, int width, bool copy,
                 float* to) const;
    RowView read_for_scores(const AttentionJob& job, const ScoreTerm& term, const Tile& tile, float* to) const;
    void finish(const AttentionJob& job, const float* states, int head, float* weights) const;

    const Isa& isa_;
    const AttentionArgs& args_;
    const AttentionPlan& plan_;
    float* workspace_;
};

}  // namespace slimrt::cpu
