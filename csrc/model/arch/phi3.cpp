// Phi-3: Llama with fused tensors, unpermuted RoPE and longrope; partial rotary in Phi-4-mini.
#include "model/arch/arch.h"

namespace slimrt {

const Architecture phi3 = {
    .name = "phi3",
    .positions = Positions::rope_neox,
    .partial_rotary = true,
    .fused_qkv = Presence::required,
    .fused_gate_up = true,
    .sliding_window = true,
};

}  // namespace slimrt
