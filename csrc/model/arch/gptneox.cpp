// GPT-NeoX: Pythia, GPT-NeoX-20B, Dolly 2, RedPajama. LayerNorm and biases everywhere, the first part of each
// head rotated, residual in parallel (or not: use_parallel_residual). Pythia's GELU is the exact one; others
// say so (slimrt.activation).
#include "model/arch/arch.h"

namespace slimrt {

const Architecture gptneox = {
    .name = "gptneox",
    .norm = NormKind::layer,
    .positions = Positions::rope_neox,
    .partial_rotary = true,
    .parallel_residual = true,
    .qkv_bias = Presence::required,
    .linear_bias = Presence::required,
    .fused_qkv = Presence::optional,  // in three where heads or layers share K and V (MLKV)
    .gated_ffn = Presence::never,
    .activation = Activation::gelu_erf,
};

}  // namespace slimrt
