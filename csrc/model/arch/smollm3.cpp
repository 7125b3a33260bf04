// SmolLM3: Llama, of which every fourth layer knows no positions.
#include "model/arch/arch.h"

namespace slimrt {

const Architecture smollm3 = {
    .name = "smollm3",
    .layers = {.unturned_period = 4},
};

}  // namespace slimrt
