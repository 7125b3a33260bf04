// Phi-3: Llama with fused tensors, unpermuted RoPE and longrope.
#include "model/arch/arch.h"

namespace slimrt {

const Architecture phi3 = {
    .name = "phi3",
    .positions = Positions::rope_neox,
    .fused_qkv = true,
    .fused_gate_up = true,
    .sliding_window = true,
};

}  // namespace slimrt
