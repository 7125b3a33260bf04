// OPT (all but 350M, whose norms come after): learned positions, LayerNorm, biases everywhere, a plain ReLU
// FFN. No other program has files of it: its names are GPT-2's.
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
