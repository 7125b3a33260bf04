#pragma once

#include "model/architecture.h"

namespace slimrt {

extern const Architecture llama, gpt2, gptneox, moonshine, olmo2, phi2, phi3, qwen2, qwen3, t5, whisper;

}  // namespace slimrt
