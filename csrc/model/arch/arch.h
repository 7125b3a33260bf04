#pragma once

#include "model/architecture.h"

namespace slimrt {

extern const Architecture llama, gpt2, gptneox, olmo2, phi2, phi3, qwen2;

}  // namespace slimrt
