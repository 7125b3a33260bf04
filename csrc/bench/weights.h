// Weights of any type, whose values do not matter but for being finite and normal, which takes as long as
// any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace slimrt::bench {

/// So many bytes, random but for the upper bits of an exponent, wherever a type may have its numbers: up to 2
/// in F16, BF16 and F32, to 2^64 in MXFP4.
std::vector<uint8_t> random_weights(size_t bytes);

}  // namespace slimrt::bench
