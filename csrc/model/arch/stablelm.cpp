// StableLM 2 1.6B, StableLM 3B, Stable Code 3B, Rocket 3B: Llama with LayerNorm and a part of each head
// rotated.
#include "core/error.h"
#include "model/arch/arch.h"
#include "model/config.h"

namespace slimrt {
namespace {

/// use_parallel_residual is ignored: converters write true where config.json does not say it.
void configure(const GgufFile& file, const std::string&, ModelConfig&) {
    if (file.tensors().count("blk.0.attn_norm.weight") && !file.tensors().count("blk.0.ffn_norm.weight"))
        fail(ErrorCode::unsupported, file.path(), ": StableLM 2 12B's layers, with attention and FFN in ",
             "parallel and LayerNorms of each head of q and k, are not supported");
}

}  // namespace

const Architecture stablelm = {
    .name = "stablelm",
    .norm = NormKind::layer,
    .positions = Positions::rope_neox,
    .partial_rotary = true,
    .qkv_bias = Presence::optional,
    .configure = configure,
};

}  // namespace slimrt
