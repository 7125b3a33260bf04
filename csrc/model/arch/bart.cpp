// BART and Marian: the original transformer, whose norms are of sums. Tables of positions, biases everywhere,
// an ungated FFN; BART norms the embeddings. Only slimrt writes such files; tensors are named as Whisper's,
// norms of sums as BERT's.
#include "model/arch/arch.h"
#include "model/config.h"

namespace slimrt {

const Architecture bart = {
    .name = "bart",
    .norm = NormKind::layer,
    .embedding_norm = Presence::optional,
    .norms = Norms::sums,
    .positions = Positions::learned,
    .qkv_bias = Presence::required,
    .linear_bias = Presence::required,
    .output_bias = Presence::optional,
    .fused_qkv = Presence::never,
    .gated_ffn = Presence::never,
    .activation = Activation::gelu_erf,
    .configure = read_scales,
    .encoder = EncoderKind::tokens,
    .encoder_positions = true,
};

}  // namespace slimrt
