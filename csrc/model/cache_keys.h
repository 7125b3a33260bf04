// What a file says of its cache: the keys slimrt.cache.* that a conversion wrote, and the shapes of folded
// tensors.
#pragma once

#include <string>
#include <vector>

#include "core/gguf.h"
#include "model/weights.h"

namespace slimrt {

using Names = std::vector<std::string>;

/// Names by layer at `key`; without it `missing` for each. Throws Error{format}, as all below do for values
/// that no conversion writes.
Names stored_names(const GgufFile& file, const char* key, int n_layers, const char* missing);

/// The layer whose rows each layer reads, itself or one before it: by the file's key, else by the
/// architecture.
std::vector<int> read_owners(const GgufFile& file, const ModelConfig& model);

/// How many KV heads each layer was folded to keep V of; 0 without the key.
std::vector<int> read_v_heads(const GgufFile& file, const ModelConfig& model);

/// The sparse_delta that the file's conversion found to change little. Throws Error{argument} without the
/// key.
float stored_delta(const GgufFile& file);

/// Whether layers that share keys read them before RoPE and never rotate them. Throws Error{unsupported}
/// where each layer would norm shared keys.
bool shares_unrotated_keys(const GgufFile& file, const ModelConfig& model);

/// Width of the residual that a layer was folded with; -1 without a fold. extra: the caller's tensors.
int64_t folded_rank(const GgufFile& file, const ModelConfig& model, const ExtraTensors& extra, int layer);

/// How many KV heads share a latent in a layer's folded tensors; without these the default.
int latent_heads_of(const GgufFile& file, const ModelConfig& model, const ExtraTensors& extra, int layer);

}  // namespace slimrt
