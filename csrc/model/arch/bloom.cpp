// BLOOM: ALiBi, a LayerNorm of the embedding, biases everywhere, an ungated GELU FFN.
#include "model/arch/arch.h"

namespace slimrt {

const Architecture bloom = {
    .name = "bloom",
    .norm = NormKind::layer,
    .embedding_norm = Presence::required,
    .positions = Positions::alibi,
    .qkv_bias = Presence::required,
    .linear_bias = Presence::required,
    .fused_qkv = Presence::required,
    .gated_ffn = Presence::never,
    .activation = Activation::gelu_tanh,
};

}  // namespace slimrt
