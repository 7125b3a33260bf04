// OPT (but not 350M, whose norms come after): learned positions, LayerNorm, biases everywhere, an ungated
// ReLU FFN. Only slimrt writes such files; tensors are named as GPT-2's.
#include "model/arch/arch.h"

namespace slimrt {

const Architecture opt = {
    .name = "opt",
    .norm = NormKind::layer,
    .positions = Positions::learned,
    .qkv_bias = Presence::required,
    .linear_bias = Presence::required,
    .gated_ffn = Presence::never,
    .activation = Activation::relu,
};

}  // namespace slimrt
