// Chronos-2: an encoder of patches of time series. In each layer a patch attends to the others of its series,
// with rotary positions, and then to those of the other series of its group at the same time. Scores are not
// scaled.
#include "model/arch/arch.h"

namespace slimrt {

const Architecture chronos2 = {
    .name = "chronos2",
    .positions = Positions::rope_neox,
    .scaled_scores = false,
    .gated_ffn = Presence::never,
    .activation = Activation::relu,
    .encoder = EncoderKind::series,
};

}  // namespace slimrt
