// Picks tokens from rows of logits.
#pragma once

#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <optional>
#include <random>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/candidates.h"
#include "engine/dry.h"

namespace slimrt {

struct SamplerOptions {
    float temperature = 0.8f;     // 0: greedy
    int64_t top_k = 40;           // 0: all
    double top_p = 0.95;          // 1: all
    double min_p = 0.05;          // relative to the largest probability; 0: all
    double typical_p = 1;         // 1: all
    float repeat_penalty = 1;     // 1: none
    float frequency_penalty = 0;  // 0: none
    float presence_penalty = 0;   // 0: none
    int64_t repeat_last_n = 64;   // how many tokens of history penalties count; -1: all
    uint64_t seed = 0;
    std::vector<std::pair<int32_t, float>> logit_bias;
    DryOptions dry;
    double top_n_sigma = 0;      // standard deviations below the largest logit; 0: all
    double xtc_probability = 0;  // how often the top choices are left out; 0: never
    double xtc_threshold = 0.1;  // from this probability on a token is a top choice
    int64_t mirostat = 0;        // 2: in place of all filters; 0: none
    double mirostat_tau = 5;     // target surprise of a choice, in bits
    double mirostat_eta = 0.1;   // learning rate of the bound
};

/// Applies top-n-sigma (Tang et al., "Top-nσ: Not All Logits Are You Need", 2024), top-k, typical, top-p and
/// min-p, in this order, each to the softmax of what the one before left.
void filter(Candidates& candidates, const SamplerOptions& options);

/// Memory in which rows are sampled one after another, by any sampler.
struct SamplerScratch {
    std::vector<float> row, left;
    Candidates candidates;
};

/// The choices of one text. In this order, as in llama.cpp: mask and bias; repeat penalty (logits above 0 are
/// divided by it, others multiplied), frequency (times the occurrences) and presence penalty (subtracted);
/// DRY; filter(); XTC ("Exclude Top Choices", by p-e-w, text-generation-webui #6335); temperature. At
/// temperature 0 the likeliest token after the penalties, with the lowest id among equals. With mirostat
/// (Basu et al., "Mirostat", arXiv:2007.14966, algorithm 2) the penalties, temperature, and then only tokens
/// whose surprise is within a bound, which follows the surprise of earlier choices. A seed gives the same
/// choices on every machine. Not thread-safe.
class Sampler {
  public:
    /// Throws Error{argument} naming the option that is out of range.
    explicit Sampler(SamplerOptions options);
    /// Adds tokens to the text, for the penalties and DRY.
    void accept(std::span<const int32_t> tokens);
    /// mask: empty, or a bit for each token, the lowest bit first: 1 where it may be chosen. Throws as
    /// Candidates::reset(), before anything is drawn; a NaN that the mask rules out is ignored.
    /// ids: of the logits, ascending, where these are of at least n_deciding() tokens; then without a mask,
    /// and the choice is the same as from the row.
    int32_t sample(std::span<const float> logits, std::span<const uint32_t> mask, SamplerScratch& scratch,
                   std::span<const int32_t> ids = {});
    /// How many of the likeliest tokens, of equal ones those with the lowest ids, decide the next choice if
    /// no mask does. 0: all, or more than Backend::kMaxLargest.
    int64_t n_deciding(int64_t n_vocab) const;

  private:
    std::span<const float> changed(std::span<const float> logits, std::span<const int32_t> ids,
                                   std::span<const uint32_t> mask, std::vector<float>& row) const;
    bool penalises() const;
    bool raises(int64_t n_vocab) const;
    void penalise(std::span<float> row, std::span<const int32_t> ids) const;
    double random();
    int32_t choose(Candidates& candidates);
    int32_t choose_by_surprise(Candidates& candidates);

    SamplerOptions options_;
    std::mt19937_64 random_;
    std::deque<int32_t> history_;  // only where penalties need it
    std::unordered_map<int32_t, int64_t> counts_;
    std::vector<int32_t> dry_history_;  // only where DRY needs it
    double most_surprise_ = 0;          // mirostat's bound, in bits
};

/// Natural logarithms of probabilities, by the softmax of a row of logits.
struct TokenLogprobs {
    float logprob = 0;
    std::vector<std::pair<int32_t, float>> top;
};
/// Of a token, and of the n likeliest ones. Throws as Candidates::reset().
TokenLogprobs token_logprobs(std::span<const float> logits, int32_t token, int64_t n,
                             SamplerScratch& scratch);

/// A row to choose from. n_logprobs > 0: with the logprobs, of the row as it came, of so many tokens.
struct RowToSample {
    Sampler* sampler = nullptr;
    std::span<const float> logits;
    std::span<const uint32_t> mask;
    std::span<const int32_t> ids;  // as in Sampler::sample(); then no mask, n_logprobs and joint_from
    int64_t n_logprobs = 0;
    /// Tokens from here on are one choice, as Whisper's timestamps are: if they are likelier together than
    /// the likeliest token before them, one of them is chosen. Logprobs are then of what this and the mask
    /// leave. -1: none.
    int64_t joint_from = -1;
};
struct Choice {
    int32_t token = 0;
    std::optional<TokenLogprobs> logprobs;
    std::exception_ptr error;  // set where the row failed: it has no token then
};
/// Calls its second argument for each item, with the index of the thread, which is below scratch.size().
using Parallel = std::function<void(int64_t n, const std::function<void(int64_t item, int thread)>&)>;
/// Samplers must differ. A row that fails has its error in its Choice: the others have moved on.
std::vector<Choice> sample_rows(std::span<const RowToSample> rows, std::span<SamplerScratch> scratch,
                                const Parallel& parallel);

}  // namespace slimrt
