// Gemma and CodeGemma: Llama with an embedding times sqrt(d_model), GeGLU, wide heads and unpermuted RoPE.
// Files hold 1 + w of each norm.
#include "model/arch/gemma.h"

#include <cmath>

#include "model/arch/arch.h"
#include "model/config.h"

namespace slimrt {

const Architecture gemma = {
    .name = "gemma",
    .positions = Positions::rope_neox,
    .activation = Activation::gelu_tanh,
    .configure = [](const GgufFile&, const std::string&,
                    ModelConfig& c) { c.embedding_scale = std::sqrt(float(c.d_model)); },
};

void scale_gemma(const GgufFile& file, const std::string& prefix, int layers_of_27b, ModelConfig& c) {
    c.embedding_scale = std::sqrt(float(c.d_model));
    const int width = c.n_layers == layers_of_27b ? c.d_model / c.n_heads : c.head_dim;
    c.score_scale = float(file.number(prefix + "attention.scale", 1 / std::sqrt(double(width))));
}

}  // namespace slimrt
