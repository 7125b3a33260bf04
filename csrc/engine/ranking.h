// Rows of logits as a beam search reads them: what log probabilities are relative to, and the likeliest
// tokens.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace slimrt {

/// log(sum of e^logit), summed in float32; -infinity where every logit is, NaN where one is NaN or +infinity.
double log_normaliser(std::span<const float> row);

/// The ids of the `count` largest logits above -infinity, or of as many as there are, largest first; of equal
/// ones the lowest ids. For rows without NaN, which log_normaliser() finds.
std::vector<int32_t> largest(std::span<const float> row, size_t count);

}  // namespace slimrt
