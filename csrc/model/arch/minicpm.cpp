// MiniCPM: Llama with scales of embedding, residuals and logits, which the first files of MiniCPM-2B lack. So
// do all files of MiniCPM 3, which has latent attention (MLA) and NeoX RoPE.
#include <cmath>

#include "model/arch/arch.h"
#include "model/config.h"

namespace slimrt {
namespace {

void configure(const GgufFile& file, const std::string& prefix, ModelConfig& c) {
    c.embedding_scale = 12;
    c.residual_scale = 1.4f / std::sqrt(float(c.n_layers));
    c.output_scale = 256.0f / float(c.d_model);
    read_scales(file, prefix, c);
}

}  // namespace

const Architecture minicpm = {
    .name = "minicpm",
    .configure = configure,
};

const Architecture minicpm3 = {
    .name = "minicpm3",
    .positions = Positions::rope_neox,
    .partial_rotary = true,
    .latent = true,
    .configure = configure,
};

}  // namespace slimrt
