// OLMo-2: Llama with norms after attention and FFN instead of before them, QK-norm and unpermuted RoPE.
// OLMo-3 has the same name: three of four layers have a sliding window, in which RoPE is not scaled.
#include "model/arch/arch.h"

namespace slimrt {

const Architecture olmo2 = {
    .name = "olmo2",
    .norms = Norms::after,
    .positions = Positions::rope_neox,
    .qk_norm = QkNorm::row,
    .sliding_window = true,
    .layers = {.full_period = 4, .window_rope = WindowRope::own},
};

}  // namespace slimrt
