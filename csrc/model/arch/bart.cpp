// BART and Marian, the original transformer, whose norms are of sums; and mBART, M2M100, NLLB and Pegasus,
// whose norms are of inputs. Tables of positions, biases everywhere, an ungated FFN; BART and mBART norm the
// embeddings. Only slimrt writes such files; tensors are named as Whisper's, norms of sums as BERT's.
#include "model/arch/arch.h"
#include "model/config.h"

namespace slimrt {
namespace {

Architecture with_norms(const char* name, Norms norms) {
    return {
        .name = name,
        .norm = NormKind::layer,
        .embedding_norm = Presence::optional,
        .norms = norms,
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
}

}  // namespace

const Architecture bart = with_norms("bart", Norms::sums), mbart = with_norms("mbart", Norms::before);

}  // namespace slimrt
