// Phi-1, 1.5 and 2: attention and FFN in parallel, both of one LayerNorm; the first part of each head
// rotated, biases everywhere, also of the output head.
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
