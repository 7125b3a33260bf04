// Gemma 2: Gemma with norms of the outputs of attention and FFN too, scores and logits that are capped, and a
// window in every other layer. Files hold 1 + w of each norm.
#include "model/arch/arch.h"
#include "model/arch/gemma.h"
#include "model/config.h"

namespace slimrt {
namespace {

/// Files of the first days lack what the model cannot do without: they are refused.
void settle(const GgufFile& file, const std::string& prefix, ModelConfig& c) {
    for (const char* key : {"attn_logit_softcapping", "final_logit_softcapping", "attention.sliding_window"})
        file.number(prefix + key);
    scale_gemma(file, prefix, 46, c);
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
