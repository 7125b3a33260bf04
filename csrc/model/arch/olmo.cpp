// OLMo 1: Llama with LayerNorms that have neither weight nor bias, and q, k and v clamped in some models.
#include "model/arch/arch.h"
#include "model/config.h"

namespace slimrt {

const Architecture olmo = {
    .name = "olmo",
    .norm = NormKind::layer,
    .norm_bias = false,
    .norm_weight = false,
    .configure =
        [](const GgufFile& file, const std::string& prefix, ModelConfig& c) {
            c.clamp_kqv = float(file.number(prefix + "attention.clamp_kqv", 0.0));
        },
};

}  // namespace slimrt
