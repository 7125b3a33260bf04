// GLM-4 (0414): Llama with norms of the outputs of attention and FFN too, biases on Q, K and V, half of each
// head rotated, pairs of neighbours as trained.
#include "core/error.h"
#include "model/arch/arch.h"
#include "model/config.h"

namespace slimrt {
namespace {

/// Text parts of GLM-4V have the same architecture name, but NeoX pairs.
void configure(const GgufFile& file, const std::string& prefix, ModelConfig&) {
    const std::string sections = prefix + "rope.dimension_sections";
    if (file.has(sections))
        fail(ErrorCode::unsupported, file.path(), ": GLM-4V's positions (", sections, ") are not supported");
}

}  // namespace

const Architecture glm4 = {
    .name = "glm4",
    .norms = Norms::both,
    .partial_rotary = true,
    .qkv_bias = Presence::optional,
    .fused_gate_up = true,
    .configure = configure,
};

}  // namespace slimrt
