// Qwen2 and Qwen2.5: Llama with biases on Q, K and V, and unpermuted RoPE.
#include "model/arch/arch.h"

namespace slimrt {

const Architecture qwen2 = {
    .name = "qwen2",
    .positions = Positions::rope_neox,
    .qkv_bias = Presence::required,
    .output_bias = Presence::optional,
};

}  // namespace slimrt
