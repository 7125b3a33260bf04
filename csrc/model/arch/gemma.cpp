// Gemma and CodeGemma: Llama with an embedding times sqrt(d_model), GeGLU, wide heads and unpermuted RoPE.
// Files hold 1 + w of each norm.
#include <cmath>

#include "model/arch/arch.h"
#include "model/config.h"

namespace slimrt {

const Architecture gemma = {
    .name = "gemma",
    .positions = Positions::rope_neox,
    .activation = Activation::gelu_tanh,
    .settle = [](const GgufFile&, const std::string&,
                 ModelConfig& c) { c.embedding_scale = std::sqrt(float(c.d_model)); },
};

}  // namespace slimrt
