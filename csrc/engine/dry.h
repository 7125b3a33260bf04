// DRY ("Don't Repeat Yourself"): a penalty on tokens that would go on repeating what stands in the text,
// which grows with the length of the repetition. By p-e-w, text-generation-webui #5637; in llama.cpp #9702.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

namespace slimrt {

struct DryOptions {
    float multiplier = 0;                        // 0: none
    float base = 1.75f;                          // of the power that the penalty grows with
    int64_t allowed_length = 2;                  // repetitions up to it cost nothing
    int64_t penalty_last_n = -1;                 // tokens of history that it looks at; -1: all
    std::vector<std::vector<int32_t>> breakers;  // sequences of tokens that no repetition goes across
};

/// For each token that followed earlier on what the history ends with: the length of the longest such ending,
/// if it is no shorter than what is allowed. No ending goes across a breaker, and a breaker of one token
/// repeats nothing.
std::unordered_map<int32_t, int64_t> repetitions(std::span<const int32_t> history, const DryOptions& options);

/// multiplier * base^(length - allowed_length), at most the largest float; 0 for shorter ones. By products
/// alone, which every machine rounds alike.
double dry_penalty(const DryOptions& options, int64_t length);

}  // namespace slimrt
