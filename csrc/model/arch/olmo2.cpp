// OLMo-2: Llama with norms after attention and FFN instead of before them, QK-norm and unpermuted RoPE.
#include "model/arch/arch.h"

namespace slimrt {

const Architecture olmo2 = {
    .name = "olmo2",
    .norms = Norms::after,
    .positions = Positions::rope_neox,
    .qk_norm = QkNorm::row,
};

}  // namespace slimrt
