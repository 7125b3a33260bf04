#pragma once

#include "model/architecture.h"

namespace slimrt {

extern const Architecture llama, gpt2, phi3;

}  // namespace slimrt
