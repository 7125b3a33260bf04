// Latent attention (MLA): its sizes and its tensors.
#pragma once

#include "model/ffn.h"

namespace slimrt {

/// Reads sizes from either set of keys that llama.cpp wrote. Throws Error{format}: missing or out of range.
void read_latent(const GgufFile& file, const std::string& prefix, ModelConfig& config);

/// Loads all attention tensors but W_O of the layer whose names begin with `prefix`.
void load_latent(TensorSource& file, const ModelConfig& config, const std::string& prefix, AttnWeights& w);

}  // namespace slimrt
