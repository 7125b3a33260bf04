#pragma once

#include "model/architecture.h"

namespace slimrt {

extern const Architecture bitnet, bloom, command_r, gemma, glm4, gpt2, gptneox, granite, llama, minicpm,
    moonshine, mpt, olmo, olmo2, openlm, opt, phi2, phi3, qwen2, qwen3, stablelm, t5, whisper;

}  // namespace slimrt
