// Granite 3 (dense): Llama with scales of embedding, residuals, scores and logits.
#include "model/arch/arch.h"
#include "model/config.h"

namespace slimrt {

const Architecture granite = {
    .name = "granite",
    .qkv_bias = Presence::optional,
    .linear_bias = Presence::optional,
    .configure = read_scales,
};

}  // namespace slimrt
