// What layers of encoders and decoders have in common.
#pragma once

#include "model/weights.h"

namespace slimrt {

/// Returns out, the normed x; or x where there is no such norm.
Tensor norm(Backend& backend, const ModelConfig& config, const Norm& w, Tensor x, Tensor out);

/// out = norm(ffn(norm(x))), with the norms that there are and the architecture's Ffn.
void feed_forward(Backend& backend, const ModelConfig& config, const LayerWeights& w, Scratch& scratch,
                  Tensor x, Tensor out);

}  // namespace slimrt
