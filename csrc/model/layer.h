// What layers of encoders and decoders have in common.
#pragma once

#include "model/weights.h"

namespace slimrt {

/// Writes norm(x) to out and returns it; without such a norm returns x.
Tensor norm(Backend& backend, const ModelConfig& config, const Norm& w, Tensor x, Tensor out);

/// x = norm(x + table[positions]), without a table or a norm that a model does not have.
void add_positions(Backend& backend, const ModelConfig& config, Tensor table, const Norm& w, Tensor positions,
                   Scratch& scratch, Tensor x);

/// out = post_norm(ffn(norm(x))) by the architecture's Ffn, without the norms that a model does not have.
void feed_forward(Backend& backend, const ModelConfig& config, const LayerWeights& w, Scratch& scratch,
                  Tensor x, Tensor out);

}  // namespace slimrt
