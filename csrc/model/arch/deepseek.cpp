// DeepSeek-MoE (V1) and the text part of DeepSeek-VL2-tiny: Llama with dense first layers, then experts
// and shared experts.
#include "model/arch/arch.h"

namespace slimrt {

const Architecture deepseek = {
    .name = "deepseek",
    .ffn = &expert_ffn,
};

}  // namespace slimrt
