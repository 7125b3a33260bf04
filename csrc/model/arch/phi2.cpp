// Phi-1, 1.5 and 2: one LayerNorm for attention and FFN, which are in parallel; the first part of each head
// rotated, biases everywhere, the head's too.
#include "model/arch/arch.h"

namespace slimrt {

const Architecture phi2 = {
    .name = "phi2",
    .norm = NormKind::layer,
    .norms = Norms::shared,
    .positions = Positions::rope_neox,
    .partial_rotary = true,
    .parallel_residual = true,
    .qkv_bias = Presence::required,
    .linear_bias = Presence::required,
    .output_bias = Presence::required,
    .gated_ffn = Presence::never,
    .activation = Activation::gelu_tanh,
};

}  // namespace slimrt
