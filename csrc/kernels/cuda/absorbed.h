// Absorbed decode attention: values of which every head reads the whole row (modes k, k+r, v, x, xr, e). Each
// byte of the stored rows is read once for a query. RoPE tables must rotate by angles proportional to the
// position.
#pragma once

#include <optional>

#include "kernels/cuda/kernels.h"

namespace slimrt::cuda {

inline constexpr int kClusterCapability = 90;
/// Fills Device::clusters: how many clusters of each size run at once. In absorbed_sm90.cu.
void ask_for_clusters(Device& device);

/// Whether absorbed() serves such terms on this device, for any sequences; else other kernels do.
bool absorbed_can(const Device& device, const AttentionArgs& args);

/// How a call is divided among blocks, for any sequences.
struct AbsorbedShape {
    int team = 0;             // blocks that share rows by columns
    int teams = 0;            // teams that run at once
    int jobs = 0;             // splits of sequences in a launch, at most
    bool via_memory = false;  // teams are no clusters and exchange data through device memory
    size_t workspace = 0;     // bytes
};
std::optional<AbsorbedShape> absorbed_shape(const Device& device, const AttentionArgs& args);

/// Bytes; by the terms alone, so that what is planned for one sequence is enough for many.
size_t absorbed_workspace(const Device& device, const AttentionArgs& args);

/// Attention of n_placed sequences of one query each; args.sequences is not read. See attention() in
/// kernels.h.
void absorbed(const Device& device, const AttentionArgs& args, const PlacedSequence* placed, int n_placed,
              int query_shift, std::byte* workspace);

/// Attention of args.sequences with several queries each: over stored rows each query is a sequence of its
/// own; over the step's own rows, which are few, attention_general() serves it. In absorbed_queries.cu.
size_t absorbed_queries_workspace(const Device& device, const AttentionArgs& args);
void absorbed_queries(const Device& device, const AttentionArgs& args, const PlacedSequence* placed,
                      int query_shift, SparseCounts* counts, std::byte* workspace);

}  // namespace slimrt::cuda
