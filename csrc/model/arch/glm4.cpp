// GLM-4 (0414): Llama with norms of the outputs of attention and FFN too, biases on Q, K and V, half of each
// head rotated, unpermuted neighbours.
#include "model/arch/arch.h"

namespace slimrt {

const Architecture glm4 = {
    .name = "glm4",
    .norms = Norms::both,
    .partial_rotary = true,
    .qkv_bias = Presence::optional,
    .fused_gate_up = true,
};

}  // namespace slimrt
