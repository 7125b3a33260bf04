// OpenLM as DCLM-7B is: Llama with LayerNorms without bias, also of the whole q and k rows, fused tensors and
// unpermuted RoPE. No other program has files of it: its names are Phi-3's and OLMo-2's.
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
