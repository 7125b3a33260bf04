// gpt-oss: experts and biases in every layer, a sliding window in every other one, attention sinks.
#include "core/error.h"
#include "model/arch/arch.h"
#include "model/config.h"

namespace slimrt {
namespace {

void configure(const GgufFile& file, const std::string&, ModelConfig& c) {
    if (!c.sinks)
        fail(ErrorCode::format, file.path(), ": tensor 'blk.0.attn_sinks.weight' is missing (architecture '",
             c.architecture->name, "' needs it)");
}

}  // namespace

const Architecture gpt_oss = {
    .name = "gpt-oss",
    .ffn_norm = "post_attention_norm",
    .positions = Positions::rope_neox,
    .whole_ramp = false,
    .qkv_bias = Presence::required,
    .linear_bias = Presence::required,
    .ffn = &expert_ffn,
    .activation = Activation::clamped_swish,
    .router = {.renormalised = true},
    .sliding_window = true,
    .layers = {.full_period = 2},
    .configure = configure,
};

}  // namespace slimrt
