// What layers of encoders and decoders have in common.
#pragma once

#include "model/weights.h"

namespace slimrt {

/// Returns out, the normed x; or x where there is no such norm.
Tensor norm(Backend& backend, const ModelConfig& config, const Norm& w, Tensor x, Tensor out);

/// out = norm(W_down act(W_up norm(x))), gated or not.
void feed_forward(Backend& backend, const ModelConfig& config, const LayerWeights& w, Scratch& scratch,
                  Tensor x, Tensor out);

}  // namespace slimrt
