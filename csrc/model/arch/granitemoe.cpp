// Granite 3 with experts: shares are a softmax over the scores of those that are taken, which is what a
// softmax over all of them is when these are renormalised.
#include "model/arch/arch.h"
#include "model/config.h"

namespace slimrt {

const Architecture granitemoe = {
    .name = "granitemoe",
    .qkv_bias = Presence::optional,
    .ffn = &expert_ffn,
    .router = {.renormalised = true},
    .settle = read_scales,
};

}  // namespace slimrt
