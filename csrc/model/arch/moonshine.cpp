// Moonshine: three convolutions over samples, partial rotary positions in encoder and decoder, no biases but
// in the FFN, which is gated in the decoder only.
#include "model/arch/arch.h"

namespace slimrt {

const Architecture moonshine = {
    .name = "moonshine",
    .norm = NormKind::layer,
    .norm_bias = false,
    .positions = Positions::rope_interleaved,
    .partial_rotary = true,
    .linear_bias = Presence::required,
    .attn_output_bias = false,
    .gated_ffn = Presence::optional,
    .activation = Activation::silu,
    .ungated_activation = Activation::gelu_erf,
    .encoder = EncoderKind::audio,
    .convolutions = {{"conv1", 127, 64, 0, 1, Activation::tanh, false, true},
                     {"conv2", 7, 3, 0, 2, Activation::gelu_erf},
                     {"conv3", 3, 2, 0, 1, Activation::gelu_erf}},
};

}  // namespace slimrt
