// Biases of scores that depend on the distance of a key: T5's relative positions, ALiBi.
#pragma once

#include "kernels/backend.h"
#include "model/config.h"

namespace slimrt {

/// bias [n_heads, n distances] of the values of buckets [buckets, n_heads], f32: causal n distances, the last
/// that of a token to itself; else 2 n - 1, of which that is the middle. Nothing on a dry backend.
void fill_relative_bias(Backend& backend, const ModelConfig& c, Tensor values, Tensor bias, int64_t n,
                        bool causal);

/// bias [n_heads, n], the last column that of a token to itself. Nothing on a dry backend.
void fill_alibi(Backend& backend, const ModelConfig& c, Tensor bias);

}  // namespace slimrt
