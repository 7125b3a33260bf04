// BitNet b1.58: Llama with norms of what W_O and the down projection read too, and unpermuted RoPE. Its
// matrices are ternary, times a scale, in files of any type; slimrt.activation says where the gate is ReLU
// squared (2B-4T).
#include "model/arch/arch.h"

namespace slimrt {

const Architecture bitnet = {
    .name = "bitnet",
    .sub_norms = true,
    .positions = Positions::rope_neox,
};

}  // namespace slimrt
