// EXAONE 4: norms after attention and FFN, RMS norms of each q and k head; in the 32B model three of four
// layers have a sliding window, and the others no position encoding (NoPE).
#include "model/arch/arch.h"

namespace slimrt {

const Architecture exaone4 = {
    .name = "exaone4",
    .norms = Norms::after,
    .positions = Positions::rope_neox,
    .qk_norm = QkNorm::head,
    .sliding_window = true,
    .layers = {.full_period = 4, .window_rope = WindowRope::only},
};

}  // namespace slimrt
