// Latent attention (MLA): its sizes and its tensors.
#pragma once

#include "model/ffn.h"

namespace slimrt {

/// Sizes, in the keys of either layout that llama.cpp wrote. Throws Error{format}: one is missing or absurd.
void read_latent(const GgufFile& file, const std::string& prefix, ModelConfig& config);

/// Everything but W_O of the layer whose names begin with `prefix`.
void load_latent(TensorSource& file, const ModelConfig& config, const std::string& prefix, AttnWeights& w);

}  // namespace slimrt
