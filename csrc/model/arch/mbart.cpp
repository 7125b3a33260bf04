// mBART, M2M100, NLLB and Pegasus: BART with norms of inputs. mBART norms the embeddings.
#include "model/arch/arch.h"
#include "model/config.h"

namespace slimrt {

const Architecture mbart = {
    .name = "mbart",
    .norm = NormKind::layer,
    .embedding_norm = Presence::optional,
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
