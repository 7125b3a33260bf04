// DeepSeek-V2 and relatives: latent attention (MLA); dense first layers, then experts and shared experts.
// Mistral's (Small 4, Large 3) also scale q by position.
#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "model/arch/arch.h"
#include "model/config.h"

namespace slimrt {
namespace {

/// Under YaRN DeepSeek scales scores (by mscale squared) and not cos and sin: attn_factor cancels
/// magnitude(). A file must say mscale, and attn_factor is refused: without these rules programs differ.
void configure(const GgufFile& file, const std::string& prefix, double scale, ModelConfig& c) {
    read_temperature(file, prefix, scale, c);
    RopeConfig& rope = c.ropes[0];
    if (rope.scaling != RopeScaling::yarn) return;
    const double stretch = std::log(std::max(rope.factor, 1.0));
    const double size = 1 + file.number(prefix + "rope.scaling.yarn_log_multiplier") * stretch;
    c.score_scale *= float(size * size);
    if (rope.attn_factor)
        fail(ErrorCode::unsupported, file.path(), ": ", prefix,
             "rope.scaling.attn_factor or yarn_attn_factor under YaRN is not supported in architecture '",
             c.architecture->name, "'");
    rope.attn_factor = 1 / (1 + 0.1 * stretch);
}

/// As published; files converted from Hugging Face's lack it.
constexpr double kMistral4TemperatureScale = 0.1f;

}  // namespace

const Architecture deepseek2 = {
    .name = "deepseek2",
    .partial_rotary = true,
    .ffn = &expert_ffn,
    .latent = true,
    .configure = [](const GgufFile& file, const std::string& prefix,
                    ModelConfig& c) { configure(file, prefix, 0, c); },
};

const Architecture mistral4 = {
    .name = "mistral4",
    .partial_rotary = true,
    .ffn = &expert_ffn,
    .latent = true,
    .configure = [](const GgufFile& file, const std::string& prefix,
                    ModelConfig& c) { configure(file, prefix, kMistral4TemperatureScale, c); },
};

}  // namespace slimrt
