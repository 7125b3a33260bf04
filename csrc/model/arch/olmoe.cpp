// OLMoE: Llama with QK-norm of whole rows, unpermuted RoPE and experts in every layer.
#include "model/arch/arch.h"

namespace slimrt {

const Architecture olmoe = {
    .name = "olmoe",
    .positions = Positions::rope_neox,
    .qk_norm = QkNorm::row,
    .ffn = &expert_ffn,
};

}  // namespace slimrt
