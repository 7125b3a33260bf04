// Gemma 2: Gemma with norms of the outputs of attention and FFN too, soft caps of scores and logits, and a
// sliding window in every other layer. Files hold 1 + w of each norm.
#include "model/arch/arch.h"
#include "model/arch/gemma.h"
#include "model/config.h"

namespace slimrt {
namespace {

/// The first files lack keys that the model needs: they are refused.
void configure(const GgufFile& file, const std::string& prefix, ModelConfig& c) {
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
    .configure = configure,
};

}  // namespace slimrt
