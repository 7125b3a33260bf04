// Phi-3.5-MoE: Mixtral with LayerNorm, unpermuted RoPE, biases, and a router by SparseMixer.
#include "model/arch/arch.h"

namespace slimrt {

const Architecture phimoe = {
    .name = "phimoe",
    .norm = NormKind::layer,
    .positions = Positions::rope_neox,
    .qkv_bias = Presence::optional,
    .linear_bias = Presence::optional,
    .output_bias = Presence::optional,
    .ffn = &expert_ffn,
    .router = {.near = 0.02f},  // twice the jitter of the published model
    .sliding_window = true,
    .own_longrope = 1.243163121f,  // short_mscale and long_mscale, which llama.cpp does not write
};

}  // namespace slimrt
