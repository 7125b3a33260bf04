// Attention of few queries over whole rows that serve all heads (modes k, k+r, v, x, xr, cross mode e).
#pragma once

#include "kernels/cuda/kernels.h"

namespace slimrt::cuda {

bool absorbed_can(const Device& device, const AttentionArgs& args);
size_t absorbed_workspace(const Device& device, const AttentionArgs& args);
void absorbed(const Device& device, const AttentionArgs& args, const PlacedSequence* placed, int query_shift,
              SparseCounts* counts, std::byte* workspace);

}  // namespace slimrt::cuda
