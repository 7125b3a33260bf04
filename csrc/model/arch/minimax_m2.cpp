// MiniMax-M2: QK-norm of whole rows, a part of each head rotated, experts chosen by sigmoids and a bias.
#include "model/arch/arch.h"

namespace slimrt {

const Architecture minimax_m2 = {
    .name = "minimax-m2",
    .positions = Positions::rope_neox,
    .partial_rotary = true,
    .qk_norm = QkNorm::row,
    .ffn = &expert_ffn,
    .router = {.sigmoid = true, .renormalised = true},
};

}  // namespace slimrt
