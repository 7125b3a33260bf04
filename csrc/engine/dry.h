// DRY ("Don't Repeat Yourself"): a penalty on tokens that would continue a repetition, which grows with the
// repetition's length. By p-e-w, text-generation-webui #5637; in llama.cpp #9702.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

namespace slimrt {

struct DryOptions {
    float multiplier = 0;                        // 0: none
    float base = 1.75f;                          // the penalty grows by its powers
    int64_t allowed_length = 2;                  // the longest repetition that is not penalised
    int64_t penalty_last_n = -1;                 // how many tokens of history count; -1: all
    std::vector<std::vector<int32_t>> breakers;  // sorted sequences of tokens, which no repetition crosses
};

/// For each token that followed earlier on the tokens that the history ends with: how many of these agree, at
/// most, if at least allowed_length do. They never cross a breaker, and a breaker of one token is not
/// penalised.
std::unordered_map<int32_t, int64_t> repetitions(std::span<const int32_t> history, const DryOptions& options);

/// multiplier * base^(length - allowed_length), at most the largest float; 0 for shorter repetitions. By
/// products alone, which every machine rounds alike.
double dry_penalty(const DryOptions& options, int64_t length);

}  // namespace slimrt
