// Gemma 3 (text): Gemma with RMS norms of each q and k head and of the outputs of attention and FFN; five of
// six layers see a window, in which RoPE has a base of its own. Files hold 1 + w of each norm.
#include <cmath>

#include "model/arch/arch.h"
#include "model/config.h"

namespace slimrt {
namespace {

/// The 27B model alone scales scores by what a head is of the model's width; files do not say it.
constexpr int kLayersOf27B = 62;

void settle(const GgufFile& file, const std::string& prefix, ModelConfig& c) {
    c.embedding_scale = std::sqrt(float(c.d_model));
    const int width = c.n_layers == kLayersOf27B ? c.d_model / c.n_heads : c.head_dim;
    c.score_scale = float(file.number(prefix + "attention.scale", 1 / std::sqrt(double(width))));
}

}  // namespace

const Architecture gemma3 = {
    .name = "gemma3",
    .norms = Norms::both,
    .positions = Positions::rope_neox,
    .qk_norm = QkNorm::head,
    .activation = Activation::gelu_tanh,
    .sliding_window = true,
    .layers = {.full_period = 6, .window_rope = WindowRope::own, .window_base = 10000},
    .settle = settle,
};

}  // namespace slimrt
