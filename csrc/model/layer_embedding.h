// Embeddings that each layer has of its own (Gemma 3n and 4).
#pragma once

#include "cache/scratch.h"
#include "model/weights.h"

namespace slimrt {

class TensorSource;

/// The tensors of all layers' embeddings, side by side, and of one layer, whose names begin with `prefix`;
/// none without ModelConfig::d_layer_embd. Throws Error{format}, and Error{unsupported} for a type whose
/// blocks embeddings do not divide into.
void load_layer_embeddings(TensorSource& file, const ModelConfig& config, Weights& weights);
void load_layer_embedding(TensorSource& file, const ModelConfig& config, const std::string& prefix,
                          LayerWeights& weights);

/// x += norm(W (act(W_gate x) * e)), e [n, width] of the layer's own embedding of the tokens and of what its
/// projection makes of the model's: (norm(W_proj first / sqrt(d)) + table[tokens] sqrt(width)) / sqrt(2).
/// first: the model's embedding of the tokens, [n, d_model], as the first layer reads it; x too; out: of its
/// shape.
void add_layer_embedding(Backend& backend, const ModelConfig& config, const Weights& weights, int layer,
                         Tensor tokens, Tensor first, Scratch& scratch, Tensor x, Tensor out);

}  // namespace slimrt
