// Granite 3 with experts: a softmax over the chosen experts' scores, which equals a softmax over all experts
// that is renormalised.
#include "model/arch/arch.h"
#include "model/config.h"

namespace slimrt {

const Architecture granitemoe = {
    .name = "granitemoe",
    .qkv_bias = Presence::optional,
    .ffn = &expert_ffn,
    .router = {.renormalised = true},
    .configure = read_scales,
};

}  // namespace slimrt
