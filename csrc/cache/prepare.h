// What modes derive from weights at load.
#pragma once

#include <functional>
#include <initializer_list>

#include "cache/cache_mode.h"

namespace slimrt {

/// The output's bias [1, d_model] plus W_O b_V, for modes whose rows lack V's bias; o_bias without one.
Tensor fold_v_bias(Backend& backend, const AttnConfig& config, const AttnWeights& weights, Tensor v_bias,
                   std::vector<Buffer>& owned);

/// A weight [kv width, row width], transposed for each query head: [n_heads * row width, head_dim], which
/// maps a head's q to a query against whole rows. The first `left_out` columns of a head are zeros. Held in
/// the weight's own type; where that has blocks, in f16, which rounds far less than they do, or f32 beside
/// rows of f32.
Tensor absorb_q(Backend& backend, const AttnConfig& config, Tensor weight, std::vector<Buffer>& owned,
                int left_out = 0);

/// For each head the n rows of a weight [.., width] from first_row(head) on, transposed: [n_heads * width, n]
/// of a type without blocks, whose first `left_out` columns are zeros.
Tensor transpose_heads(Backend& backend, Tensor weight, int n_heads,
                       const std::function<int64_t(int)>& first_row, int64_t n, DType type, const char* what,
                       std::vector<Buffer>& owned, int left_out = 0);

/// An f32 vector [1, n] that prepare() computed, from host memory.
Tensor derived_vector(Backend& backend, const std::vector<float>& values, const char* what,
                      std::vector<Buffer>& owned);
/// The weight of a norm of each head, repeated for all heads.
Tensor norm_of_heads(Backend& backend, Tensor norm, int n_heads, std::vector<Buffer>& owned);
/// Values of an f32 vector; on a dry backend zeros.
std::vector<float> values_of(Backend& backend, Tensor vector);
/// A vector of V's width, expanded from KV heads to the query heads that read them: [q width].
std::vector<float> for_query_heads(const AttnConfig& config, const std::vector<float>& v);

/// Static scales [1, width] of a row's channels: divided by them, channels need no scales of their own.
Fold row_scale_fold(const AttnConfig& config, const char* suffix, int64_t width);
/// 1 / row_scale, checked; none where row_scale is none.
Tensor row_shrink(Backend& backend, const AttnConfig& config, const char* suffix, Tensor row_scale,
                  std::vector<Buffer>& owned);

/// A hash for Prepared::fingerprint(); tensors may be none.
uint64_t fingerprint_of(Backend& backend, std::initializer_list<Tensor> tensors);

}  // namespace slimrt
