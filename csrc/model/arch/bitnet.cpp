// BitNet b1.58: Llama with norms of the inputs of W_O and of the down projection, and unpermuted RoPE. Its
// matrices are ternary times a scale, stored in any type; slimrt.activation says where the gate is squared
// ReLU (2B-4T).
#include "model/arch/arch.h"

namespace slimrt {

const Architecture bitnet = {
    .name = "bitnet",
    .sub_norms = true,
    .positions = Positions::rope_neox,
};

}  // namespace slimrt
