#pragma once

#include "model/architecture.h"

namespace slimrt {

extern const Architecture bloom, command_r, gemma, gpt2, gptneox, llama, moonshine, mpt, olmo, olmo2, phi2,
    phi3, qwen2, qwen3, stablelm, t5, whisper;

}  // namespace slimrt
