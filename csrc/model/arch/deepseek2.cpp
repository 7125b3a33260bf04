// DeepSeek-V2 and relatives: latent attention (MLA); the first layers dense, then experts and a network that
// every token takes. Mistral's (Small 4, Large 3) have q that grow with their position, too.
#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "model/arch/arch.h"
#include "model/config.h"

namespace slimrt {
namespace {

/// Under YaRN scores are scaled in place of what rotates, by what the file says: where it does not, others
/// scale what rotates, or both.
void settle(const GgufFile& file, const std::string& prefix, double growth, ModelConfig& c) {
    read_query_growth(file, prefix, growth, c);
    RopeConfig& rope = c.ropes[0];
    if (rope.scaling != RopeScaling::yarn) return;
    const double stretch = std::log(std::max(rope.factor, 1.0));
    const double size = 1 + file.number(prefix + "rope.scaling.yarn_log_multiplier") * stretch;
    c.score_scale *= float(size * size);
    if (rope.attn_factor)
        fail(ErrorCode::unsupported, file.path(), ": ", prefix, "rope.scaling.attn_factor under YaRN is not ",
             "supported in architecture '", c.architecture->name, "'");
    rope.attn_factor = 1 / (1 + 0.1 * stretch);
}

constexpr double kGrowthOfMistral4 = 0.1f;  // as published; files converted from Hugging Face's leave it out

}  // namespace

const Architecture deepseek2 = {
    .name = "deepseek2",
    .partial_rotary = true,
    .ffn = &expert_ffn,
    .latent = true,
    .settle = [](const GgufFile& file, const std::string& prefix,
                 ModelConfig& c) { settle(file, prefix, 0, c); },
};

const Architecture mistral4 = {
    .name = "mistral4",
    .partial_rotary = true,
    .ffn = &expert_ffn,
    .latent = true,
    .settle = [](const GgufFile& file, const std::string& prefix,
                 ModelConfig& c) { settle(file, prefix, kGrowthOfMistral4, c); },
};

}  // namespace slimrt
