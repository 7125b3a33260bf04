// OpenLM, as in DCLM-7B: Llama with LayerNorms without bias, also of whole q and k rows, fused tensors and
// unpermuted RoPE. Only slimrt writes such files; tensors are named as Phi-3's and OLMo-2's.
#include "model/arch/arch.h"

namespace slimrt {

const Architecture openlm = {
    .name = "openlm",
    .norm = NormKind::layer,
    .norm_bias = false,
    .positions = Positions::rope_neox,
    .qk_norm = QkNorm::row,
    .fused_qkv = Presence::required,
    .fused_gate_up = true,
};

}  // namespace slimrt
