// GPT-2: learned positions, LayerNorm, biases everywhere, a plain GELU FFN (tanh or erf: slimrt.activation).
#include "model/arch/arch.h"

namespace slimrt {

const Architecture gpt2 = {
    .name = "gpt2",
    .norm = NormKind::layer,
    .positions = Positions::learned,
    .qkv_bias = Presence::required,
    .linear_bias = Presence::required,
    .fused_qkv = Presence::required,
    .gated_ffn = Presence::never,
    .activation = Activation::gelu_tanh,
};

}  // namespace slimrt
