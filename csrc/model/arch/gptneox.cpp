// GPT-NeoX: Pythia, GPT-NeoX-20B, Dolly 2, RedPajama. LayerNorm and biases everywhere, the first part of each
// head rotated, attention and FFN in parallel unless use_parallel_residual is false. GELU is exact (erf), or
// what slimrt.activation says.
#include "model/arch/arch.h"
#include "model/config.h"

namespace slimrt {
namespace {

void configure(const GgufFile& file, const std::string& prefix, ModelConfig& c) {
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
    .configure = configure,
};

}  // namespace slimrt
