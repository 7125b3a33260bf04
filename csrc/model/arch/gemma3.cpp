// Gemma 3 (text): Gemma with RMS norms of each q and k head and of the outputs of attention and FFN; five of
// six layers have a sliding window and another base of RoPE. Files hold 1 + w of each norm.
#include "model/arch/arch.h"
#include "model/arch/gemma.h"
#include "model/config.h"

namespace slimrt {

const Architecture gemma3 = {
    .name = "gemma3",
    .norms = Norms::both,
    .positions = Positions::rope_neox,
    .qk_norm = QkNorm::head,
    .activation = Activation::gelu_tanh,
    .sliding_window = true,
    .layers = {.full_period = 6, .window_rope = WindowRope::own, .window_base = 10000},
    .configure = [](const GgufFile& file, const std::string& prefix,
                    ModelConfig& c) { scale_gemma(file, prefix, 62, c); },
};

}  // namespace slimrt
