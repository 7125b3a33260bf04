// Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts and a shared expert that has a gate.
#include "model/arch/arch.h"

namespace slimrt {

const Architecture qwen2moe = {
    .name = "qwen2moe",
    .positions = Positions::rope_neox,
    .qkv_bias = Presence::required,
    .ffn = &expert_ffn,
};

}  // namespace slimrt
