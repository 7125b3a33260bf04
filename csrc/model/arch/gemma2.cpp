// Gemma 2: Gemma with norms of the outputs of attention and FFN too, scores and logits that are capped, and a
// window in every other layer. Files hold 1 + w of each norm.
#include <cmath>

#include "model/arch/arch.h"
#include "model/config.h"

namespace slimrt {
namespace {

/// The 27B model alone scales scores by what a head is of the model's width; files do not say it.
constexpr int kLayersOf27B = 46;

/// Files of the first days lack what the model cannot do without: they are refused.
void settle(const GgufFile& file, const std::string& prefix, ModelConfig& c) {
    for (const char* key : {"attn_logit_softcapping", "final_logit_softcapping", "attention.sliding_window"})
        file.number(prefix + key);
    c.embedding_scale = std::sqrt(float(c.d_model));
    const int width = c.n_layers == kLayersOf27B ? c.d_model / c.n_heads : c.head_dim;
    c.score_scale = float(file.number(prefix + "attention.scale", 1 / std::sqrt(double(width))));
}

}  // namespace

const Architecture gemma2 = {
    .name = "gemma2",
    .norms = Norms::both,
    .positions = Positions::rope_neox,
    .activation = Activation::gelu_tanh,
    .sliding_window = true,
    .layers = {.full_period = 2},
    .settle = settle,
};

}  // namespace slimrt
