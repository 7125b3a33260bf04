// The tokens of a row that may be chosen, and the filters that leave fewer of them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace slimrt {

/// In the order of their ids. Probabilities are those of softmax over what is left, at temperature 1. Of
/// equal tokens a filter takes that with the lower id first. The same row leaves and draws the same tokens on
/// every machine. Vectors keep their memory from row to row.
class Candidates {
  public:
    /// All tokens of a row, which has to outlive its use here. Throws Error{format} on NaN and +infinity,
    /// Error{argument} on an empty row and where all is -infinity.
    void reset(std::span<const float> logits);

    int32_t likeliest() const;
    /// Those that are left.
    std::vector<int32_t> ids() const;
    /// log(sum of e^logit).
    double log_normaliser();
    /// The ids that are left, the likeliest first.
    std::vector<int32_t> ranked() const;
    /// -log2 of the probability of one that is left, in bits, at a temperature.
    double surprise(int32_t id, float temperature);

    /// Those whose logit is at most so many standard deviations of all logits below the largest.
    void keep_top_n_sigma(double deviations);
    void keep_top_k(int64_t k);
    /// The fewest that together have this share of the probability, 0 < share < 1, the likeliest first.
    void keep_top_p(double share);
    /// The same, but first those whose -log p is nearest to the entropy.
    void keep_typical(double share);
    /// Those with at least this share of the probability of the likeliest.
    void keep_min_p(double share);
    /// All but those with at least this probability; of these the least likely one stays.
    void drop_top_choices(double threshold);
    /// Those with at most this surprise at a temperature, and the likeliest whatever its own is.
    void keep_surprise(double bits, float temperature);

    /// One of them by chance: the one whose part of [0, 1), after those with lower ids, holds `at`.
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
    std::vector<float> left_;     // logits of
    std::vector<int32_t> ids_;    // these
    std::vector<float> p_;        // e^(logit - top) of what is left
    std::vector<double> sums_;    // of its blocks
    std::vector<uint32_t> keys_;  // the larger the better
    std::vector<double> buckets_;
};

}  // namespace slimrt
