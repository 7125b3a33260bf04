// MiniCPM: Llama with an embedding, residuals and logits that are scaled; the first files of MiniCPM-2B leave
// its scales out, and those of MiniCPM 3, which has latent attention (MLA) and halves that rotate, all do.
#include <cmath>

#include "model/arch/arch.h"
#include "model/config.h"

namespace slimrt {
namespace {

void settle(const GgufFile& file, const std::string& prefix, ModelConfig& c) {
    c.embedding_scale = 12;
    c.residual_scale = 1.4f / std::sqrt(float(c.n_layers));
    c.output_scale = 256.0f / float(c.d_model);
    read_scales(file, prefix, c);
}

}  // namespace

const Architecture minicpm = {
    .name = "minicpm",
    .settle = settle,
};

const Architecture minicpm3 = {
    .name = "minicpm3",
    .positions = Positions::rope_neox,
    .partial_rotary = true,
    .latent = true,
    .settle = settle,
};

}  // namespace slimrt
