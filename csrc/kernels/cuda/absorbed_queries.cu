// Absorbed attention of sequences with several queries: a chat's next turn, speculative drafts, an encoder's
// rows.
#include <algorithm>

#include "kernels/cuda/absorbed.h"
#include "kernels/cuda/attention_view.h"

namespace slimrt::cuda {
namespace {

constexpr size_t kAlign = 16;

size_t aligned(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

int queries_of(const AttentionArgs& args) {
    int n = 0;
    for (const AttentionSequence& s : args.sequences) n += s.n_queries;
    return n;
}

/// A block a sequence: its queries as sequences over the same stored rows, without the step's own rows; and
/// the sequence without stored rows.
__global__ void part_sequences(const PlacedSequence* from, PlacedSequence* queries, PlacedSequence* own) {
    PlacedSequence s = from[blockIdx.x];
    int first = 0;
    for (unsigned i = 0; i < blockIdx.x; ++i) first += from[i].n_queries;
    for (int i = static_cast<int>(threadIdx.x); i < s.n_queries; i += static_cast<int>(blockDim.x)) {
        PlacedSequence one = s;
        one.position += i;
        one.query += i;
        one.n_queries = 1;
        one.fresh = 0;
        queries[first + i] = one;
    }
    s.begin = s.end = 0;
    if (threadIdx.x == 0) own[blockIdx.x] = s;
}

/// The workspace, but for what the kernels need: for so many queries of any sequences.
struct Workspace {
    size_t queries, own, lse;

    explicit Workspace(const AttentionArgs& args)
        : queries(aligned(queries_of(args) * sizeof(PlacedSequence))),
          own(queries),
          lse(args.lse ? 0 : aligned(args.values[0].out.rows * args.n_heads * sizeof(float))) {}
    size_t total() const { return queries + own + lse; }
};

}  // namespace

size_t absorbed_queries_workspace(const Device& device, const AttentionArgs& args) {
    return Workspace(args).total() + std::max(kMaxPartBytes, absorbed_workspace(device, args));
}

void absorbed_queries(const Device& device, const AttentionArgs& args, const PlacedSequence* placed,
                      int query_shift, SparseCounts* counts, std::byte* workspace) {
    const Workspace sizes(args);
    auto* const queries = reinterpret_cast<PlacedSequence*>(workspace);
    auto* const own = reinterpret_cast<PlacedSequence*>(workspace + sizes.queries);
    AttentionArgs some = args;
    if (!some.lse)
        some.lse =
            Tensor(workspace + sizes.queries + sizes.own, DType::F32, args.values[0].out.rows, args.n_heads);
    workspace += sizes.total();
    launch(device, part_sequences, {.grid = dim3(unsigned(args.sequences.size())), .block = dim3(32)}, placed,
           queries, own);
    absorbed(device, some, queries, queries_of(args), query_shift, workspace);
    const auto sees_own = [](const AttentionSequence& s) { return s.fresh; };
    if (std::ranges::none_of(args.sequences, sees_own)) return;
    some.merge = true;
    some.sinks = {};
    attention_general(device, some, view_of(some, own, query_shift, counts), workspace);
}

}  // namespace slimrt::cuda
