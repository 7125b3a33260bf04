// Qwen3-MoE and Qwen3-Coder: Qwen3 with experts in every layer.
#include "model/arch/arch.h"

namespace slimrt {

const Architecture qwen3moe = {
    .name = "qwen3moe",
    .positions = Positions::rope_neox,
    .qk_norm = QkNorm::head,
    .ffn = &expert_ffn,
    .router = {.renormalised = true},
};

}  // namespace slimrt
