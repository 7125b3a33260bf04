#include "kernels/cpu/attention_plan.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace slimrt::cpu {
namespace {

constexpr int kRowsOfQueries = 64;            // (head, query) pairs of a job: enough to use a row often
constexpr int kFewQueries = 4;                // up to here a job has all heads and so reads whole rows
constexpr int64_t kMaxValueFloats = 1 << 17;  // what a job accumulates stays in the second-level cache
constexpr int64_t kTileFloats = 1 << 16;      // and so do the rows it reads at once
constexpr int kMinTile = 16, kMaxTile = 64;
constexpr int64_t kMinPartRows = 128;  // shorter parts cost more to merge than they save
constexpr int kPartsPerThread = 2;     // so that threads of unequal speed end together

/// The widest of the rows of one head.
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

/// The positions of `span` that queries at [first, last] may see.
Span visible(Span span, int64_t first, int64_t last, int64_t window) {
    if (window > 0) span.first = std::max(span.first, first - window + 1);
    span.end = std::min(span.end, last + 1);
    return span;
}

size_t aligned(size_t floats) { return (floats + 15) / 16 * 16; }

}  // namespace

AttentionPlan::AttentionPlan(const AttentionArgs& args, int n_threads)
    : n_groups(common_groups(args)), heads_per_group(args.n_heads / n_groups) {
    for (const AttentionSequence& sequence : args.sequences) add_jobs(args, sequence);
    split(n_threads);
    lay_out(args, n_threads);
}

/// The last queries come first: they see most.
void AttentionPlan::add_jobs(const AttentionArgs& args, const AttentionSequence& sequence) {
    const int n = sequence.n_queries;
    const bool few = n <= kFewQueries;
    const int groups_of_job = few ? n_groups : 1, heads = groups_of_job * heads_per_group;
    const int64_t most = std::max<int64_t>(1, kMaxValueFloats / (heads * widest_row(args)));
    const int queries = std::min<int64_t>(few ? n : std::max(1, kRowsOfQueries / heads), most);
    for (int tile = (n + queries - 1) / queries; tile-- > 0;) {
        AttentionJob job{};
        job.sequence = &sequence;
        job.first_query = tile * queries;
        job.n_queries = std::min(queries, n - job.first_query);
        job.n_groups = groups_of_job;
        const int64_t first = job.position(0), last = job.position(job.n_queries - 1);
        job.stored = visible({sequence.begin, sequence.end}, first, last, args.window);
        if (sequence.fresh) {
            job.fresh = visible({sequence.position, sequence.position + n}, first, last, args.window);
        }
        for (job.first_group = 0; job.first_group < n_groups; job.first_group += groups_of_job)
            jobs.push_back(job);
    }
}

/// Long jobs are split until the longest part is a fair share of all rows.
void AttentionPlan::split(int n_threads) {
    int64_t total = 0;
    for (const AttentionJob& job : jobs) total += job.stored.size() + job.fresh.size();
    const int64_t shares = n_threads == 1 ? 1 : n_threads * kPartsPerThread;
    const int64_t share = std::max(kMinPartRows, (total + shares - 1) / shares);
    for (size_t i = 0; i < jobs.size(); ++i) {
        const int64_t size = jobs[i].stored.size() + jobs[i].fresh.size();
        jobs[i].n_parts = std::max<int64_t>(1, (size + share - 1) / share);
        for (int part = 0; part < jobs[i].n_parts; ++part) items.push_back({static_cast<int>(i), part});
    }
}

void AttentionPlan::lay_out(const AttentionArgs& args, int n_threads) {
    size_t pairs = 0;  // (head, query)
    int parts = 0;
    for (const AttentionJob& job : jobs) {
        pairs = std::max<size_t>(pairs, job.n_groups * heads_per_group * job.n_queries);
        parts = std::max(parts, job.n_parts);
    }
    int64_t width = 1;  // the widest rows of a group
    const auto widen_for = [&](const auto& term) {
        width = std::max<int64_t>(width, int64_t(term.n_heads) / n_groups * term.dim);
    };
    for (const ScoreTerm& term : args.scores) widen_for(term);
    for (const ValueTerm& term : args.values) widen_for(term);
    tile = std::clamp<int64_t>(kTileFloats / width / kMinTile * kMinTile, kMinTile, kMaxTile);

    size_t end = 0;
    const auto take = [&end](size_t floats) { return std::exchange(end, end + aligned(floats)); };
    for (size_t i = 0; i < args.values.size(); ++i)
        state.values[i] = take(pairs * row_stride(args.values[i].dim));
    state.max = take(pairs);
    state.sum = take(pairs);
    state.size = end;

    end = 0;
    for (size_t i = 0; i < args.scores.size(); ++i) scratch.q[i] = take(pairs * args.scores[i].dim);
    scratch.scores = take(pairs * tile);
    scratch.rows = take(tile * row_stride(width));
    scratch.factor = take(pairs);
    scratch.weights = take(parts);
    scratch.state = take(state.size);
    scratch.size = end;

    end = scratch.size * n_threads;
    for (AttentionJob& job : jobs) {
        if (job.n_parts > 1) job.states = take(job.n_parts * state.size);
    }
    floats = end;
}

}  // namespace slimrt::cpu
