#pragma once

#include "model/architecture.h"

namespace slimrt {

extern const Architecture bart, bitnet, bloom, chronos2, cohere2, command_r, deepseek, deepseek2, exaone4,
    gemma, gemma2, gemma3, gemma4, glm4, gpt2, gpt_oss, gptneox, granite, granitemoe, llama, minicpm,
    minicpm3, mbart, minimax_m2, mistral3, mistral4, moonshine, mpt, olmo, olmo2, olmoe, openlm, opt, phi2,
    phi3, phimoe, qwen2, qwen2moe, qwen3, qwen3moe, smollm3, stablelm, t5, whisper;

}  // namespace slimrt
