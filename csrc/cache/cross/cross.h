// The registered cross-attention modes and what they have in common.
#pragma once

#include "cache/cross_mode.h"
#include "cache/modes/modes.h"

namespace slimrt {

const CrossMode* cross_kv_mode();
const CrossMode* cross_k_mode();
const CrossMode* cross_e_mode();
const CrossMode* cross_e1_mode();

/// Why modes that compute V from K refuse; empty where K is wide enough. `what`: cannot be computed from it.
std::string narrow_k(const AttnConfig& config, const char* what);

/// q of the step's tokens.
Tensor cross_queries(Backend& backend, const CrossInput& in);

/// Attention of all of a source's rows.
void cross_attention(Backend& backend, const AttnConfig& config, std::span<const AttentionSequence> sources,
                     const ScoreTerm& scores, const ValueTerm& values);

/// Calls f with some queries at a time, since absorbed ones are as wide as a row for each head.
using SomeQueries = std::function<void(int64_t first, int64_t n, std::span<const AttentionSequence> sources)>;
void some_queries(const CrossInput& in, const SomeQueries& f);

}  // namespace slimrt
