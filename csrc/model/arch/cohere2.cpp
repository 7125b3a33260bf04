// Command R7B and Command A: Command R, of which three of four layers see a window; the others know no
// positions.
#include "model/arch/arch.h"
#include "model/config.h"

namespace slimrt {

const Architecture cohere2 = {
    .name = "cohere2",
    .norm = NormKind::layer,
    .norm_bias = false,
    .norms = Norms::shared,
    .parallel_residual = true,
    .sliding_window = true,
    .layers = {.full_period = 4, .window_rope = WindowRope::only},
    .settle = [](const GgufFile& file, const std::string& prefix,
                 ModelConfig& c) { c.output_scale = float(file.number(prefix + "logit_scale")); },
};

}  // namespace slimrt
