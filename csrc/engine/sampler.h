// Picks a token from a row of logits.
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <vector>

namespace slimrt {

struct SamplerOptions {
    float temperature = 0.8f;  // 0: greedy
    int top_k = 40;            // 0: all
    float top_p = 0.95f;       // 1: all
    float min_p = 0.05f;       // relative to the largest probability; 0: all
    float repeat_penalty = 1;  // 1: none
    int repeat_last_n = 64;    // tokens of history the penalty looks at
    uint64_t seed = 0;
};

/// Repeat penalty, then top-k, top-p, min-p on the softmax, then temperature, as llama.cpp orders them.
/// Deterministic for a seed.
class Sampler {
  public:
    /// Throws Error{argument} naming the option that is out of range.
    explicit Sampler(const SamplerOptions& options);
    int32_t sample(std::span<const float> logits, std::span<const int32_t> history);

  private:
    SamplerOptions options_;
    std::mt19937_64 random_;
    struct Candidate {
        int32_t token;
        float logit, p;
    };
    std::vector<Candidate> candidates_;
    void truncate();
};

}  // namespace slimrt
