// Ministral 3 and Devstral 2: Llama with YaRN, whose magnitude yarn_log_multiplier divides, and q scaled by
// position (as in Llama 4).
#include <algorithm>
#include <cmath>

#include "model/arch/arch.h"
#include "model/config.h"

namespace slimrt {
namespace {

void configure(const GgufFile& file, const std::string& prefix, ModelConfig& c) {
    RopeConfig& rope = c.ropes[0];
    read_temperature(file, prefix, 0, c);
    const double divided = file.number(prefix + "rope.scaling.yarn_log_multiplier", 0.0);
    if (rope.scaling == RopeScaling::yarn)
        rope.attn_factor = (rope.attn_factor ? rope.attn_factor : 1) /
                           (1 + 0.1 * divided * std::log(std::max(rope.factor, 1.0)));
}

}  // namespace

const Architecture mistral3 = {
    .name = "mistral3",
    .sliding_window = true,
    .configure = configure,
};

}  // namespace slimrt
