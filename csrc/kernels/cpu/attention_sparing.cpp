// Attention of few queries over rows that all heads read, some of which a budget of softmax weight spares: a
// stretch of rows at a time, the newest first, since most of the weight is often theirs. What is known of a
// denominator only grows, so a budget that holds for what was met so far holds in the end too.
#include <algorithm>
#include <cstring>

#include "kernels/cpu/attention_run.h"
#include "kernels/cpu/row_address.h"

namespace slimrt::cpu {
namespace {

/// From here on a pair reads all of kAbsorbedRows rows: rows of a list are laid side by side for one pair
/// alone (of AVX-512 20 instructions for 4 rows and 64 columns), the others once for all (4, and 1 - 2
/// loads).
constexpr double kDenseShare = 0.25;

/// Of four weights.
bool all_zero(const float* p) {
    uint64_t bits[2];
    std::memcpy(bits, p, sizeof bits);
    return (bits[0] | bits[1]) == 0;
}

}  // namespace

/// Where what is listed lies, row after row.
struct AttentionRun::Listed {
    int64_t *data, *scales;
    float* weights;

    void set(int64_t i, const Rows& rows, const AttentionJob& job, int64_t position, float weight) const {
        const HeadBytes bytes = head_bytes(rows.dtype, rows.head_dim());
        const int64_t row = position % kBlockTokens;
        const int64_t block = job.sequence->table[position / kBlockTokens] * int64_t(rows.block_stride);
        data[i] = block + row * int64_t(bytes.elements);
        scales[i] = block + kBlockTokens * int64_t(bytes.elements) + row * int64_t(bytes.scales);
        weights[i] = weight;
    }
    ListedRows list(int64_t first, int64_t end, float* out) const {
        return {data + first, scales + first, weights + first, end - first, out};
    }
};

void AttentionRun::compute_sparely(const AttentionJob& job, Span span, float* scratch, float* state,
                                   SparseCounts& counts) const {
    if (span.size() == 0) return;
    prepare_absorbed(job, scratch);
    std::fill_n(scratch + plan_.scratch.passed, plan_.heads_per_group * job.n_queries, 0.0f);
    for (int64_t end = span.end, first; end > span.first; end = first) {
        first = std::max(span.first, (end - 1) / kStretchRows * kStretchRows);
        score_stretch(job, {first, end}, scratch, state);
        pass_over(job, {first, end}, scratch, state, counts);
        for (size_t t = 0; t < args_.values.size(); ++t)
            add_spared_values(job, {first, end}, t, scratch, state);
    }
}

void AttentionRun::score_stretch(const AttentionJob& job, Span span, float* scratch, float* state) const {
    for (int64_t first = span.first, next; first < span.end; first = next) {
        next = std::min(span.end, (first / kBlockTokens + 1) * kBlockTokens);
        if (plan_.by_block) copy_biases(job, span, first, 0, 1, scratch);
        score_absorbed(job, first, next, scratch, state,
                       scratch + plan_.scratch.spread + first % kStretchRows, kStretchStride);
    }
}

/// Scores of a stretch to weights, those that the budget spares to 0.
void AttentionRun::pass_over(const AttentionJob& job, Span span, float* scratch, float* state,
                             SparseCounts& counts) const {
    const int pairs = plan_.heads_per_group * job.n_queries;
    const int64_t n = span.size();
    const bool squared = args_.sparse_delta > 0;
    for (int pair = 0; pair < pairs; ++pair) {
        float* const s = scratch + plan_.scratch.spread + pair * kStretchStride + span.first % kStretchRows;
        float* const used = scratch + plan_.scratch.passed + pair;
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
        scratch[plan_.scratch.squares + pair] *= factor * factor;
        *used *= squared ? factor * factor : factor;
        const float share = squared ? args_.sparse_delta * *sum : args_.sparse_threshold * *sum;
        const PassedOver passed = isa_.pass_over(s, n, (squared ? share * share : share) - *used, squared);
        *used += passed.used;
        used[pairs] = passed.mass;
        counts.skipped += std::count(s, s + n, 0.0f);
    }
    counts.rows += n * pairs;
}

AttentionRun::Listed AttentionRun::listed_in(float* scratch) const {
    const size_t places = (plan_.max_pairs + 1) * kStretchRows;
    int64_t* const data = reinterpret_cast<int64_t*>(scratch + plan_.scratch.listed);
    return {data, data + places, reinterpret_cast<float*>(data + 2 * places)};
}

/// Lists the rows of a pair that have weight, from place `from` of what is listed on, and marks those of
/// kAbsorbedRows that have too many for it. Returns the next place.
int64_t AttentionRun::list_rows(const AttentionJob& job, Span span, size_t t, int pair, int64_t from,
                                float* scratch) const {
    constexpr int64_t kAtOnce = 4;
    const Listed listed = listed_in(scratch);
    const float* const p = scratch + plan_.scratch.spread + pair * kStretchStride;
    int32_t* const dense = reinterpret_cast<int32_t*>(scratch + plan_.scratch.dense) + pair;
    *dense = 0;
    int64_t to = from;
    for (int64_t first = span.first, end; first < span.end; first = end) {
        end = std::min(span.end, (first / kAbsorbedRows + 1) * kAbsorbedRows);
        const float* const some = p + first % kStretchRows;
        const int64_t n = end - first;
        if (plan_.absorbs && n - std::count(some, some + n, 0.0f) > kDenseShare * kAbsorbedRows) {
            *dense |= 1 << first % kStretchRows / kAbsorbedRows;
            continue;
        }
        for (int64_t i = 0; i < n; i += i + kAtOnce <= n && all_zero(some + i) ? kAtOnce : 1)
            if (some[i] != 0) listed.set(to++, args_.values[t].stored, job, first + i, some[i]);
    }
    return to;
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

void AttentionRun::add_spared_values(const AttentionJob& job, Span span, size_t t, float* scratch,
                                     float* state) const {
    const int pairs = plan_.heads_per_group * job.n_queries;
    const size_t stride = row_stride(args_.values[t].dim);
    ListedRows* const lists = reinterpret_cast<ListedRows*>(scratch + plan_.scratch.lists);
    int n_lists = 0;
    int64_t place = 0;
    for (int pair = 0; pair < pairs; ++pair) {
        const int64_t next = list_rows(job, span, t, pair, place, scratch);
        if (next > place)
            lists[n_lists++] =
                listed_in(scratch).list(place, next, state + plan_.state.values[t] + pair * stride);
        place = next;
    }
    add_listed(args_.values[t].stored, lists, n_lists, scratch);
    if (plan_.absorbs) add_dense(job, span, t, scratch, state);
    add_means(job, span, t, scratch, state);
}

/// What is not listed, for the pairs that it is not listed for.
void AttentionRun::add_dense(const AttentionJob& job, Span span, size_t t, float* scratch,
                             float* state) const {
    const int pairs = plan_.heads_per_group * job.n_queries;
    int32_t* const dense = reinterpret_cast<int32_t*>(scratch + plan_.scratch.dense);
    int32_t* const read = reinterpret_cast<int32_t*>(scratch + plan_.scratch.pairs);
    SetAside* const aside = reinterpret_cast<SetAside*>(scratch + plan_.scratch.aside);
    for (int64_t first = span.first, end; first < span.end; first = end) {
        end = std::min(span.end, (first / kAbsorbedRows + 1) * kAbsorbedRows);
        int n_pairs = 0;
        int64_t n_aside = 0;
        for (int pair = 0; pair < pairs; ++pair) {
            if (!(dense[pair] & 1 << first % kStretchRows / kAbsorbedRows)) continue;
            float* const p = scratch + plan_.scratch.absorbed + n_pairs * kAbsorbedRows;
            std::fill_n(p, kAbsorbedRows, 0.0f);
            std::memcpy(p + first % kAbsorbedRows,
                        scratch + plan_.scratch.spread + pair * kStretchStride + first % kStretchRows,
                        (end - first) * sizeof(float));
            n_aside += isa_.set_aside(p, kAbsorbedRows, pair, 1, scratch + plan_.scratch.squares + pair,
                                      aside + n_aside);
            read[n_pairs++] = pair;
        }
        if (n_pairs > 0)
            absorb_values(job, t, {first, end}, n_pairs, n_aside, scratch + plan_.scratch.ones, scratch,
                          state);
    }
}

/// What was passed over, as if all of it were the mean of the stretch's rows.
void AttentionRun::add_means(const AttentionJob& job, Span span, size_t t, float* scratch,
                             float* state) const {
    const int pairs = plan_.heads_per_group * job.n_queries;
    const float* const mass = scratch + plan_.scratch.passed + pairs;
    if (std::ranges::all_of(mass, mass + pairs, [](float x) { return x == 0; })) return;
    const ValueTerm& term = args_.values[t];
    float* const mean = scratch + plan_.scratch.mean;
    std::fill_n(mean, term.dim, 0.0f);
    const Listed listed = listed_in(scratch);
    for (int64_t position = span.first; position < span.end; ++position)
        listed.set(position - span.first, term.stored, job, position, 1 / static_cast<float>(span.size()));
    const ListedRows list = listed.list(0, span.size(), mean);
    add_listed(term.stored, &list, 1, scratch);
    isa_.values(mass, 1, pairs, scratch + plan_.scratch.ones, static_cast<uint32_t>(DType::F32), mean, 0, 1,
                term.dim, state + plan_.state.values[t], row_stride(term.dim));
}

}  // namespace slimrt::cpu
