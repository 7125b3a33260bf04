// Whisper, every size: two convolutions over log-mel frames, LayerNorm, biases but for K, learned positions.
#include "model/arch/arch.h"

namespace slimrt {

const Architecture whisper = {
    .name = "whisper",
    .norm = NormKind::layer,
    .positions = Positions::learned,
    .qkv_bias = Presence::required,
    .k_bias = false,
    .linear_bias = Presence::required,
    .gated_ffn = Presence::never,
    .activation = Activation::gelu_erf,
    .encoder = EncoderKind::mel,
    .encoder_positions = true,
    .convolutions = {{"conv1", 3, 1, 1, 1, Activation::gelu_erf},
                     {"conv2", 3, 2, 1, 1, Activation::gelu_erf}},
};

}  // namespace slimrt
