// Absorbed decode attention: values that read the whole row for every head (modes k, k+r, v, x, xr, e). Each
// byte of the stored rows is read once for a query. A rope table must be that of rotations by angles
// proportional to the position.
#pragma once

#include <optional>

#include "kernels/cuda/kernels.h"

namespace slimrt::cuda {

inline constexpr int kClusterCapability = 90;
/// How many clusters of each size run at once, where a device has them. absorbed_sm90.cu.
void ask_for_clusters(Device& device);

/// Whether absorbed() computes such terms on this device, of whatever sequences; others are for attention().
bool absorbed_can(const Device& device, const AttentionArgs& args);

/// How it is shared out, whatever the sequences.
struct AbsorbedShape {
    int team = 0;          // blocks that share rows by columns
    int teams = 0;         // that run at once
    int jobs = 0;          // splits of sequences that a launch may have
    bool mailed = false;   // teams are no clusters
    size_t workspace = 0;  // bytes
};
std::optional<AbsorbedShape> absorbed_shape(const Device& device, const AttentionArgs& args);

/// Bytes; depends on the terms alone, so that what is planned for one sequence suffices for many.
size_t absorbed_workspace(const Device& device, const AttentionArgs& args);

/// Of n_placed sequences with one query each; args.sequences is not read. See attention() in kernels.h.
void absorbed(const Device& device, const AttentionArgs& args, const PlacedSequence* placed, int n_placed,
              int query_shift, std::byte* workspace);

/// Of sequences with several queries, args.sequences: over stored rows each query is a sequence of its own;
/// what the step's own rows are to each other is small, and attention_general's. absorbed_queries.cu.
size_t absorbed_queries_workspace(const Device& device, const AttentionArgs& args);
void absorbed_queries(const Device& device, const AttentionArgs& args, const PlacedSequence* placed,
                      int query_shift, SparseCounts* counts, std::byte* workspace);

}  // namespace slimrt::cuda
