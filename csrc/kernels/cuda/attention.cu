// Chooses the kernel of a call: the first one that can serve it.
#include <algorithm>
#include <utility>

#include "core/error.h"
#include "kernels/cuda/absorbed.h"
#include "kernels/cuda/attention_view.h"

namespace slimrt::cuda {
namespace {

/// A call for some of the query heads, of terms whose rows all heads read.
class SomeHeads {
  public:
    SomeHeads(const AttentionArgs& all, int first, int n) : args_(all) {
        const auto part = [&](Tensor heads) {
            const int64_t width = heads.cols / all.n_heads;
            return heads ? heads.cols_of(first * width, n * width) : heads;
        };
        std::copy(all.scores.begin(), all.scores.end(), scores_);
        std::copy(all.values.begin(), all.values.end(), values_);
        for (ScoreTerm& term : scores_) term.q = part(term.q);
        for (ValueTerm& term : values_) term.out = part(term.out);
        args_.scores = {scores_, all.scores.size()};
        args_.values = {values_, all.values.size()};
        args_.n_heads = n;
        args_.lse = part(all.lse);
        args_.sinks = part(all.sinks);
        if (all.relative_bias) args_.relative_bias = all.relative_bias.rows_of(first, n);
    }
    SomeHeads(const SomeHeads&) = delete;
    SomeHeads& operator=(const SomeHeads&) = delete;
    const AttentionArgs& args() const { return args_; }

  private:
    ScoreTerm scores_[2];
    ValueTerm values_[kMaxValueTerms];
    AttentionArgs args_;
};

/// How many heads absorbed() computes at once: all, or where they read the same rows the largest part that it
/// can; 0: none.
int absorbed_heads(const Device& device, const AttentionArgs& args) {
    if (absorbed_can(device, args)) return args.n_heads;
    const auto shared = [](const auto& term) { return term.n_heads == 1; };
    if (!std::ranges::all_of(args.scores, shared) || !std::ranges::all_of(args.values, shared)) return 0;
    for (int parts = 2; parts < args.n_heads; ++parts)
        if (const int n = args.n_heads / parts;
            n * parts == args.n_heads && absorbed_can(device, SomeHeads(args, 0, n).args()))
            return n;
    return 0;
}

void attend_absorbed(const Device& device, const AttentionArgs& args, const PlacedSequence* placed,
                     int query_shift, SparseCounts* counts, std::byte* workspace) {
    const int heads = absorbed_heads(device, args);
    const bool single = most_queries(args) == 1;
    for (int first = 0; first < args.n_heads; first += heads) {
        const SomeHeads some(args, first, heads);
        if (single)
            absorbed(device, some.args(), placed, int(args.sequences.size()), query_shift, workspace);
        else
            absorbed_queries(device, some.args(), placed, query_shift, counts, workspace);
    }
}

/// For sequences that all have one query, or all several.
void attend(const Device& device, const AttentionArgs& args, const PlacedSequence* placed, int query_shift,
            SparseCounts* counts, std::byte* workspace) {
    const auto view = [&] { return view_of(args, placed, query_shift, counts); };
    switch (attention_kernel(device, args)) {
        case AttentionKernel::absorbed:
            return attend_absorbed(device, args, placed, query_shift, counts, workspace);
        case AttentionKernel::decode:
            return attention_decode(device, args, view(), workspace);
        case AttentionKernel::prefill:
            return attention_prefill(device, args, view(), workspace);
        case AttentionKernel::general:
            return attention_general(device, args, view(), workspace);
    }
}

/// The general kernel has a query's columns, and those of its result, in shared memory.
void require_shared_memory(const Device& device, const AttentionArgs& args) {
    constexpr size_t kOwn = 5 << 10;
    size_t columns = 0;
    for (const ScoreTerm& term : args.scores) columns += size_t(term.dim);
    for (const ValueTerm& term : args.values) columns += size_t(term.dim);
    const size_t bytes = columns * sizeof(float) + kOwn;
    if (bytes > device.shared_bytes)
        fail(ErrorCode::unsupported, "attention over queries and results of ", columns, " columns needs ",
             (bytes + 1023) >> 10, " KB of shared memory, a block of ", device.name, " has ",
             device.shared_bytes >> 10, ": choose another cache mode, or the CPU");
}

}  // namespace

AttentionKernel attention_kernel(const Device& device, const AttentionArgs& args) {
    if (absorbed_heads(device, args)) return AttentionKernel::absorbed;
    if (decode_can(device, args)) return AttentionKernel::decode;
    return prefill_can(device, args) ? AttentionKernel::prefill : AttentionKernel::general;
}

/// Enough for each part of a call, whatever its sequences.
size_t attention_workspace(const Device& device, const AttentionArgs& args) {
    const int heads = absorbed_heads(device, args);
    if (heads) return absorbed_queries_workspace(device, SomeHeads(args, 0, heads).args());
    const AttentionKernel kernel = attention_kernel(device, args);
    if (kernel == AttentionKernel::general) require_shared_memory(device, args);
    return kernel == AttentionKernel::prefill ? prefill_workspace(args) : kMaxPartBytes;
}

/// Splits a call into runs of sequences that all have one query, or all several: a single query among others
/// would take a kernel for many.
void attention(const Device& device, const AttentionArgs& args, const PlacedSequence* placed, int query_shift,
               SparseCounts* counts, std::byte* workspace) {
    const auto all = args.sequences;
    for (size_t first = 0, end = 0; first < all.size(); first = end) {
        const bool single = all[first].n_queries == 1;
        while (end < all.size() && (all[end].n_queries == 1) == single) ++end;
        AttentionArgs alike = args;
        alike.sequences = all.subspan(first, end - first);
        if (most_queries(alike) > 0) attend(device, alike, placed + first, query_shift, counts, workspace);
    }
}

}  // namespace slimrt::cuda
