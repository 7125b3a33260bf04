// The tokens of a row that may be chosen, and the filters that leave fewer of them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace slimrt {

/// Tokens are in the order of their ids. Probabilities are of the softmax over the tokens left, at
/// temperature 1. Of equal tokens filters keep those with lower ids. The same row leaves and draws the same
/// tokens on every machine. Vectors keep their memory from row to row.
class Candidates {
  public:
    /// All tokens of a row, which must outlive its use here. Throws Error{format} for NaN and +infinity,
    /// Error{argument} for an empty row and for one that is -infinity everywhere. ids: of the logits,
    /// ascending, where these are not all of the row; then ranked() and surprise() are not for it.
    void reset(std::span<const float> logits, std::span<const int32_t> ids = {});

    int32_t likeliest() const;
    /// The tokens that are left.
    std::vector<int32_t> ids() const;
    /// log(sum of e^logit) over the tokens left.
    double log_normaliser();
    /// The tokens that are left, likeliest first.
    std::vector<int32_t> ranked() const;
    /// -log2 of the probability of a token that is left, in bits, at a temperature.
    double surprise(int32_t id, float temperature);

    /// Keeps tokens whose logit is at most so many standard deviations of all logits below the largest.
    void keep_top_n_sigma(double deviations);
    void keep_top_k(int64_t k);
    /// Keeps the fewest tokens, likeliest first, that have this share of the probability, 0 < share < 1.
    void keep_top_p(double share);
    /// The same, but first those whose -log p is nearest to the entropy (Meister et al., 2023).
    void keep_typical(double share);
    /// Keeps tokens with at least this share of the likeliest one's probability.
    void keep_min_p(double share);
    /// Drops tokens with at least this probability, but for the least likely of them (XTC).
    void drop_top_choices(double threshold);
    /// Keeps tokens with at most this surprise at a temperature, and the likeliest in any case (Mirostat).
    void keep_surprise(double bits, float temperature);

    /// A token by chance: the one whose part of [0, 1), in the order of ids, contains `at`.
    int32_t draw(float temperature, double at);

  private:
    std::span<const float> logits() const { return whole_ ? row_ : std::span<const float>(left_); }
    int32_t id(size_t i) const { return whole_ ? int32_t(i) : ids_[i]; }
    double exponentials(float temperature);
    void keep_logits_from(float bound);
    void rank_by_logit();
    void keep_keys_until(double target, bool by_mass);

    std::span<const float> row_;
    bool whole_ = true;           // the whole row is left, and left_ and ids_ are not in use
    float top_ = 0;               // the largest logit that is left
    std::vector<float> maxima_;   // of the row's blocks
    std::vector<float> left_;     // logits of the tokens left
    std::vector<int32_t> ids_;    // their ids
    std::vector<float> p_;        // e^(logit - top_) of the tokens left
    std::vector<double> sums_;    // of p_, by blocks
    std::vector<uint32_t> keys_;  // the largest are kept
    std::vector<double> buckets_;
};

}  // namespace slimrt
