// Qwen3 (dense), its embedding and reranking models: Qwen2 without biases, with RMS norms of each q and k
// head.
#include "model/arch/arch.h"

namespace slimrt {

const Architecture qwen3 = {
    .name = "qwen3",
    .positions = Positions::rope_neox,
    .qk_norm = QkNorm::head,
};

}  // namespace slimrt
