// Which kernel answers a call: the first that can.
#include <algorithm>

#include "kernels/cuda/absorbed.h"
#include "kernels/cuda/attention_view.h"

namespace slimrt::cuda {

/// Parts of no call are larger, whatever its sequences.
size_t attention_workspace(const Device& device, const AttentionArgs& args) {
    return std::max(kMaxPartBytes, absorbed_workspace(device, args));
}

void attention(const Device& device, const AttentionArgs& args, const PlacedSequence* placed, int query_shift,
               SparseCounts* counts, std::byte* workspace) {
    if (args.sequences.empty() || most_queries(args) == 0) return;
    if (absorbed_can(device, args)) return absorbed(device, args, placed, query_shift, workspace);
    const AttentionView view = view_of(args, placed, query_shift, counts);
    if (decode_can(device, args)) return attention_decode(device, args, view, workspace);
    if (prefill_can(device, args)) return attention_prefill(device, args, view, workspace);
    attention_general(device, args, view, workspace);
}

}  // namespace slimrt::cuda
