// Absorbed decode attention: one query a sequence, values that read the whole row for every head (modes k,
// k+r, v, x, xr, e). Each byte of the stored rows is read once. A rope table must be that of rotations by
// angles proportional to the position.
#pragma once

#include "kernels/cuda/kernels.h"

namespace slimrt::cuda {

/// Whether absorbed() computes this call on this device; others are for attention().
bool absorbed_can(const Device& device, const AttentionArgs& args);

/// Bytes; depends on no position and no length.
size_t absorbed_workspace(const Device& device, const AttentionArgs& args);

/// See attention() in kernels.h.
void absorbed(const Device& device, const AttentionArgs& args, const PlacedSequence* placed, int query_shift,
              std::byte* workspace);

}  // namespace slimrt::cuda
