// Attention alone, as decoding does it, over random rows.
#pragma once

#include <span>
#include <vector>

#include "bench/arrays.h"

namespace slimrt::bench {

/// A query of each of n_seqs sequences over n rows. bias: none, or what is added to the scores of a head's
/// rows, [n_heads, n + 1] (the last column is not read): so these can be any.
struct Decoding {
    int n_heads = 1, n_kv_heads = 1, head_dim = 64;
    DType type_k = DType::F16, type_v = DType::F16;
    int64_t n = 1;
    int n_seqs = 1;
    float loud = 1;  // standard deviation of q, so of the scores
    float sparse_threshold = 0, sparse_delta = 0;
    bool absorbed = false;  // values are whole rows of the plane of keys, which rotate on read (mode k)
    bool wide = false;      // absorbed: so are queries, and nothing rotates (modes x, e)
    int rank = 0;  // absorbed: and of a plane of as many columns beside it, both with one scale a row (k+r)
    std::span<const float> bias = {};
    float score_cap = 0;

    int width() const { return n_kv_heads * head_dim; }
    int value_dim() const { return absorbed ? width() : head_dim; }
    int query_heads() const { return wide ? 1 : n_kv_heads; }  // of keys
    int query_dim() const { return wide ? width() : head_dim; }
};

/// Rotations of the positions before n, each pair of the first n_rot columns at its usual pace.
Rope usual_rope(Arrays& arrays, int64_t n, int n_rot);

/// Seconds of every repetition of so many calls, the bytes of cache that a call reads without a
/// budget, and the share of values that it skips with one.
struct AttentionTimes {
    std::vector<double> seconds;
    size_t bytes = 0;
    double skipped = 0;
};
/// Throws Error{argument} where there is nothing to measure.
AttentionTimes time_attention(Arrays& arrays, const Decoding& decoding, int repetitions, int calls = 1);

}  // namespace slimrt::bench
