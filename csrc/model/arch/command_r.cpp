// Command R and Aya 23: one LayerNorm without bias for attention and FFN, which are in parallel; unpermuted
// interleaved RoPE, scaled logits. Command R+ has LayerNorms of each head of q and k besides.
#include "core/error.h"
#include "model/arch/arch.h"
#include "model/config.h"

namespace slimrt {
namespace {

void settle(const GgufFile& file, const std::string& prefix, ModelConfig& c) {
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
    .settle = settle,
};

}  // namespace slimrt
