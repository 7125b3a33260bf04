#pragma once

#include "model/architecture.h"

namespace slimrt {

extern const Architecture llama, gpt2, gptneox, moonshine, olmo2, olmoe, phi2, phi3, qwen2, qwen2moe, t5, whisper;

}  // namespace slimrt
