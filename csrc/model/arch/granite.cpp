// Granite 3 (dense): Llama with an embedding, residuals, scores and logits that are scaled.
#include "model/arch/arch.h"
#include "model/config.h"

namespace slimrt {

const Architecture granite = {
    .name = "granite",
    .qkv_bias = Presence::optional,
    .linear_bias = Presence::optional,
    .settle = read_scales,
};

}  // namespace slimrt
