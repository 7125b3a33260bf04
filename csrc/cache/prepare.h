// What modes make of weights at load.
#pragma once

#include <functional>
#include <initializer_list>

#include "cache/cache_mode.h"

namespace slimrt {

/// Output bias [1, d_model] with W_O b_V added, for modes whose rows know no V bias; as it is without one.
Tensor fold_v_bias(Backend& backend, const AttnConfig& config, const AttnWeights& weights, Tensor v_bias,
                   std::vector<Buffer>& owned);

/// Weight [kv width, row width] per query head transposed, [n_heads * row width, head_dim] f32, which takes a
/// head's q to a query against a whole row. The first `left_out` columns of a head count for nothing.
Tensor absorb_q(Backend& backend, const AttnConfig& config, Tensor weight, std::vector<Buffer>& owned,
                int left_out = 0);

/// Of each head the n rows from first_row(head) on of a weight [.., width], transposed: [n_heads * width, n]
/// f32, whose first `left_out` columns are zeros.
Tensor transpose_heads(Backend& backend, Tensor weight, int n_heads,
                       const std::function<int64_t(int)>& first_row, int64_t n, const char* what,
                       std::vector<Buffer>& owned, int left_out = 0);

/// A vector of prepare()'s own making, from host memory; f32 [1, n].
Tensor derived_vector(Backend& backend, const std::vector<float>& values, const char* what,
                      std::vector<Buffer>& owned);
/// The weight of a norm of each head by itself, as often as there are heads.
Tensor norm_of_heads(Backend& backend, Tensor norm, int n_heads, std::vector<Buffer>& owned);
/// Values of an f32 vector; on a dry backend zeros.
std::vector<float> values_of(Backend& backend, Tensor vector);
/// A vector of V's width for the heads that the query heads read: [q width].
std::vector<float> for_query_heads(const AttnConfig& config, const std::vector<float>& v);

/// The static scales [1, width] of a row's channels, which even them out for types with one scale a row.
Fold row_scale_fold(const AttnConfig& config, const char* suffix, int64_t width);
/// 1 / row_scale, checked; none without one.
Tensor row_shrink(Backend& backend, const AttnConfig& config, const char* suffix, Tensor row_scale,
                  std::vector<Buffer>& owned);

/// Prepared::fingerprint() of these tensors, of which some may be none.
uint64_t fingerprint_of(Backend& backend, std::initializer_list<Tensor> tensors);

}  // namespace slimrt
