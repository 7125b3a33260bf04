// T5 v1.0 and v1.1, Flan-T5, mT5, UMT5 and Chronos: a learned bias of scores by distance instead of
// positions, unscaled scores, heads together narrower or wider than d_model. The FFN is gated from v1.1 on.
#include "model/arch/arch.h"

namespace slimrt {

const Architecture t5 = {
    .name = "t5",
    .positions = Positions::relative,
    .scaled_scores = false,
    .scaled_tied_output = true,
    .gated_ffn = Presence::optional,
    .activation = Activation::gelu_tanh,
    .ungated_activation = Activation::relu,
    .encoder = EncoderKind::tokens,
};

}  // namespace slimrt
