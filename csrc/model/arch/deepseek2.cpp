// DeepSeek-V2 and relatives: latent attention (MLA); the first layers dense, then experts and a network that
// every token takes.
#include <algorithm>
#include <cmath>

#include "model/arch/arch.h"
#include "model/config.h"

namespace slimrt {
namespace {

/// Under YaRN scores are scaled in place of what rotates, which files need not say.
void settle(const GgufFile& file, const std::string& prefix, ModelConfig& c) {
    RopeConfig& rope = c.ropes[0];
    if (rope.scaling != RopeScaling::yarn) return;
    const double stretch = std::log(std::max(rope.factor, 1.0));
    const double size = 1 + file.number(prefix + "rope.scaling.yarn_log_multiplier", 0.0) * stretch;
    c.score_scale *= float(size * size);
    if (rope.attn_factor == 0) rope.attn_factor = 1 / (1 + 0.1 * stretch);
}

}  // namespace

const Architecture deepseek2 = {
    .name = "deepseek2",
    .partial_rotary = true,
    .ffn = &expert_ffn,
    .latent = true,
    .settle = settle,
};

}  // namespace slimrt
