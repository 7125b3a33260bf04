#include "engine/sampler.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"

namespace slimrt {

Sampler::Sampler(const SamplerOptions& o) : options_(o), random_(o.seed) {
    auto require = [](bool ok, const char* what) {
        if (!ok) fail(ErrorCode::argument, what);
    };
    require(o.temperature >= 0 && std::isfinite(o.temperature), "temperature must be 0 or more, and finite");
    require(o.top_k >= 0, "top_k must be 0 (all) or more");
    require(o.top_p > 0 && o.top_p <= 1, "top_p must lie in (0, 1]");
    require(o.min_p >= 0 && o.min_p <= 1, "min_p must lie in [0, 1]");
    require(o.repeat_penalty > 0 && std::isfinite(o.repeat_penalty), "repeat_penalty must be positive");
    require(o.repeat_last_n >= 0, "repeat_last_n must be 0 or more");
}

int32_t Sampler::sample(std::span<const float> logits, std::span<const int32_t> history) {
    if (logits.empty()) fail(ErrorCode::argument, "there are no logits to sample from");
    candidates_.clear();
    for (size_t i = 0; i < logits.size(); ++i) {
        if (std::isnan(logits[i]))
            fail(ErrorCode::format, "the logits are NaN: the weights (or a logits_processor) are broken");
        candidates_.push_back({int32_t(i), logits[i], 0});
    }
    const size_t n = std::min(history.size(), size_t(options_.repeat_last_n));
    std::vector<int32_t> recent(history.end() - n, history.end());
    std::sort(recent.begin(), recent.end());
    recent.erase(std::unique(recent.begin(), recent.end()), recent.end());
    for (const int32_t token : recent) {
        if (token < 0 || size_t(token) >= logits.size()) continue;
        float& logit = candidates_[token].logit;
        logit = logit > 0 ? logit / options_.repeat_penalty : logit * options_.repeat_penalty;
    }
    auto by_logit = [](const Candidate& a, const Candidate& b) { return a.logit < b.logit; };
    const auto best = std::max_element(candidates_.begin(), candidates_.end(), by_logit);
    if (best->logit == -INFINITY)
        fail(ErrorCode::argument, "no token is left to choose: every logit is -infinity");
    if (options_.temperature == 0) return best->token;

    truncate();
    const float top = candidates_[0].logit;
    double total = 0;
    for (Candidate& c : candidates_) total += c.p = std::exp((c.logit - top) / options_.temperature);
    // 53 random bits by hand: std::uniform_real_distribution differs between standard libraries.
    double left = double(random_() >> 11) * 0x1p-53 * total;
    for (const Candidate& c : candidates_)
        if ((left -= c.p) < 0) return c.token;
    return candidates_.back().token;
}

/// Keeps the candidates that top-k, top-p and min-p leave, best first.
void Sampler::truncate() {
    auto better = [](const Candidate& a, const Candidate& b) {
        return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
    };
    const size_t k =
        options_.top_k ? std::min(size_t(options_.top_k), candidates_.size()) : candidates_.size();
    std::partial_sort(candidates_.begin(), candidates_.begin() + k, candidates_.end(), better);
    candidates_.resize(k);
    double total = 0;
    for (Candidate& c : candidates_) total += c.p = std::exp(c.logit - candidates_[0].logit);
    double mass = 0;
    size_t keep = 0;
    while (keep < candidates_.size() && mass < options_.top_p * total) mass += candidates_[keep++].p;
    while (keep > 1 && candidates_[keep - 1].p < options_.min_p) --keep;  // candidates_[0].p is 1
    candidates_.resize(std::max<size_t>(keep, 1));
}

}  // namespace slimrt
