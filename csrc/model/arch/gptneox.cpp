// GPT-NeoX: Pythia, GPT-NeoX-20B, Dolly 2, RedPajama. LayerNorm and biases everywhere, the first part of each
// head rotated, residual in parallel (or not: use_parallel_residual). Pythia's GELU is the exact one; others
// say so (slimrt.activation).
#include "model/arch/arch.h"
#include "model/config.h"

namespace slimrt {
namespace {

void settle(const GgufFile& file, const std::string& prefix, ModelConfig& c) {
    c.parallel_residual = file.boolean(prefix + "use_parallel_residual", true);
}

}  // namespace

const Architecture gptneox = {
    .name = "gptneox",
    .norm = NormKind::layer,
    .positions = Positions::rope_neox,
    .partial_rotary = true,
    .parallel_residual = true,
    .qkv_bias = Presence::required,
    .linear_bias = Presence::required,
    .gated_ffn = Presence::never,
    .activation = Activation::gelu_erf,
    .settle = settle,
};

}  // namespace slimrt
