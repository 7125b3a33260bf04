// Command R7B and Command A: Command R with a sliding window in three of four layers; the others have no
// position encoding (NoPE).
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
    .configure = [](const GgufFile& file, const std::string& prefix,
                    ModelConfig& c) { c.output_scale = float(file.number(prefix + "logit_scale")); },
};

}  // namespace slimrt
