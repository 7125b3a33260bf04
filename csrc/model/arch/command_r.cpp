// Command R and Aya 23: attention and FFN in parallel, both of one LayerNorm without bias; interleaved RoPE,
// scaled logits. Command R+ also has LayerNorms of each head of q and k.
#include "core/error.h"
#include "model/arch/arch.h"
#include "model/config.h"

namespace slimrt {
namespace {

void configure(const GgufFile& file, const std::string& prefix, ModelConfig& c) {
    if (file.tensors().count("blk.0.attn_q_norm.weight"))
        fail(ErrorCode::unsupported, file.path(), ": Command R+'s LayerNorms of each head of q and k ",
             "(attn_q_norm, attn_k_norm) are not supported");
    c.output_scale = float(file.number(prefix + "logit_scale"));
}

}  // namespace

const Architecture command_r = {
    .name = "command-r",
    .norm = NormKind::layer,
    .norm_bias = false,
    .norms = Norms::shared,
    .parallel_residual = true,
    .configure = configure,
};

}  // namespace slimrt
