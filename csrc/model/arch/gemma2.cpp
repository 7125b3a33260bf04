// Gemma 2: Gemma with norms of the outputs of attention and FFN too, soft caps of scores and logits, and a
// sliding window in every other layer. Files hold 1 + w of each norm.
#include "model/arch/arch.h"
#include "model/arch/gemma.h"
#include "model/config.h"

namespace slimrt {
namespace {

void configure(const GgufFile& file, const std::string& prefix, ModelConfig& c) {
    scale_gemma(file, prefix, 46, c);
}

}  // namespace

const Architecture gemma2 = {
    .name = "gemma2",
    .norms = Norms::both,
    .positions = Positions::rope_neox,
    .activation = Activation::gelu_tanh,
    .sliding_window = true,
    .usual_window = 4096,  // these three are of all published models: the first files lack their keys
    .usual_score_cap = 50,
    .usual_logit_cap = 30,
    .layers = {.full_period = 2},
    .configure = configure,
};

}  // namespace slimrt
