// Weights of any type, whose values do not matter but for being finite.
#pragma once

#include <vector>

#include "core/dtype.h"

namespace slimrt::bench {

/// So many bytes of blocks of random codes; their numbers are small.
std::vector<uint8_t> random_blocks(DType type, size_t bytes);

}  // namespace slimrt::bench
