// SmolLM3: Llama; every fourth layer has no position encoding (NoPE).
#include "model/arch/arch.h"

namespace slimrt {

const Architecture smollm3 = {
    .name = "smollm3",
    .layers = {.unturned_period = 4},
};

}  // namespace slimrt
