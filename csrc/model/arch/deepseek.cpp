// DeepSeek-MoE (V1), and what DeepSeek-VL2-tiny's text is: Llama, whose first layers are dense, then experts,
// and a network beside them that every token takes whole.
#include "model/arch/arch.h"

namespace slimrt {

const Architecture deepseek = {
    .name = "deepseek",
    .ffn = &expert_ffn,
};

}  // namespace slimrt
