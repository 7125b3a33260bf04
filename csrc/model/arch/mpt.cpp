// MPT: ALiBi, LayerNorm, no biases, an ungated GELU FFN (erf; slimrt.activation may say tanh), q, k and v
// clamped in some models.
#include "core/error.h"
#include "model/arch/arch.h"
#include "model/config.h"

namespace slimrt {
namespace {

void configure(const GgufFile& file, const std::string& prefix, ModelConfig& c) {
    c.alibi_bias = float(file.number(prefix + "attention.max_alibi_bias"));
    if (!(c.alibi_bias > 0))
        fail(ErrorCode::unsupported, file.path(), ": MPT without ALiBi (", prefix,
             "attention.max_alibi_bias is ", c.alibi_bias, ") is not supported");
    c.clamp_kqv = float(file.number(prefix + "attention.clamp_kqv", 0.0));
}

}  // namespace

const Architecture mpt = {
    .name = "mpt",
    .norm = NormKind::layer,
    .norm_bias = false,
    .positions = Positions::alibi,
    .fused_qkv = Presence::required,
    .gated_ffn = Presence::never,
    .activation = Activation::gelu_erf,
    .configure = configure,
};

}  // namespace slimrt
