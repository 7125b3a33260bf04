#pragma once

#include "model/architecture.h"

namespace slimrt {

extern const Architecture bitnet, bloom, command_r, deepseek, deepseek2, gemma, glm4, gpt2, gptneox, granite,
    granitemoe, llama, minicpm, minicpm3, moonshine, mpt, olmo, olmo2, olmoe, openlm, opt, phi2, phi3, qwen2,
    qwen2moe, qwen3, qwen3moe, stablelm, t5, whisper;

}  // namespace slimrt
