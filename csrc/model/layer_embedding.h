// Per-layer embeddings (Gemma 3n and 4).
#pragma once

#include "cache/scratch.h"
#include "model/weights.h"

namespace slimrt {

class TensorSource;

/// Loads what all layers share (their columns side by side), and one layer's tensors, whose names begin with
/// `prefix`; nothing where ModelConfig::d_layer_embd is 0. Throws Error{format}, and Error{unsupported} where
/// a layer's columns are no whole blocks of the table's type.
void load_layer_embeddings(TensorSource& file, const ModelConfig& config, Weights& weights);
void load_layer_embedding(TensorSource& file, const ModelConfig& config, const std::string& prefix,
                          LayerWeights& weights);

/// x += norm(W_proj (act(W_gate x) * e)), where e [n, width] = (norm(W_model first / sqrt(d_model)) +
/// sqrt(width) table[tokens]) / sqrt(2). first [n, d_model]: the tokens' embeddings as the first layer reads
/// them. out: memory of x's shape.
void add_layer_embedding(Backend& backend, const ModelConfig& config, const Weights& weights, int layer,
                         Tensor tokens, Tensor first, Scratch& scratch, Tensor x, Tensor out);

}  // namespace slimrt
