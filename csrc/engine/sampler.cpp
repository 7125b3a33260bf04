#include "engine/sampler.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "core/error.h"
#include "kernels/backend.h"

namespace slimrt {

void filter(Candidates& candidates, const SamplerOptions& options) {
    if (options.top_n_sigma > 0) candidates.keep_top_n_sigma(options.top_n_sigma);
    if (options.top_k > 0) candidates.keep_top_k(options.top_k);
    if (options.typical_p < 1) candidates.keep_typical(options.typical_p);
    if (options.top_p < 1) candidates.keep_top_p(options.top_p);
    if (options.min_p > 0) candidates.keep_min_p(options.min_p);
}

namespace {

constexpr float kLeastPenalty = 1e-6f;  // a logit divided by far less would be infinite

void require(bool ok, const char* what) {
    if (!ok) fail(ErrorCode::argument, what);
}

void require_valid(const DryOptions& dry) {
    require(dry.multiplier >= 0 && std::isfinite(dry.multiplier), "dry_multiplier must be 0 (none) or more");
    require(dry.base >= 1 && std::isfinite(dry.base), "dry_base must be 1 or more, and finite");
    require(dry.allowed_length >= 0, "dry_allowed_length must not be negative");
    require(dry.penalty_last_n >= -1, "dry_penalty_last_n must be -1 (all), 0 or more");
    for (const auto& breaker : dry.breakers) require(!breaker.empty(), "a sequence breaker has no tokens");
}

}  // namespace

Sampler::Sampler(SamplerOptions options)
    : options_(std::move(options)), random_(options_.seed), most_surprise_(2 * options_.mirostat_tau) {
    const SamplerOptions& o = options_;
    require(o.temperature >= 0 && std::isfinite(o.temperature), "temperature must be 0 or more, and finite");
    require(o.top_k >= 0, "top_k must be 0 (all) or more");
    require(o.top_p > 0 && o.top_p <= 1, "top_p must lie in (0, 1]");
    require(o.min_p >= 0 && o.min_p <= 1, "min_p must lie in [0, 1]");
    require(o.typical_p > 0 && o.typical_p <= 1, "typical_p must lie in (0, 1]");
    require(o.repeat_penalty >= kLeastPenalty && std::isfinite(o.repeat_penalty),
            "repeat_penalty must be at least 1e-6, and finite");
    require(std::isfinite(o.frequency_penalty), "frequency_penalty must be finite");
    require(std::isfinite(o.presence_penalty), "presence_penalty must be finite");
    require(o.repeat_last_n >= -1, "repeat_last_n must be -1 (all), 0 or more");
    require(o.top_n_sigma >= 0 && std::isfinite(o.top_n_sigma),
            "top_n_sigma must be 0 (all) or more, and finite");
    require(o.xtc_probability >= 0 && o.xtc_probability <= 1, "xtc_probability must lie in [0, 1]");
    require(o.xtc_threshold >= 0 && o.xtc_threshold <= 1, "xtc_threshold must lie in [0, 1]");
    require(o.mirostat == 0 || o.mirostat == 2, "mirostat must be 0 (none) or 2 (1 is not supported)");
    require(o.mirostat_tau >= 0 && std::isfinite(o.mirostat_tau),
            "mirostat_tau must be 0 or more, and finite");
    require(o.mirostat_eta >= 0 && std::isfinite(o.mirostat_eta),
            "mirostat_eta must be 0 or more, and finite");
    require_valid(o.dry);
    std::ranges::sort(options_.dry.breakers);
    for (const auto& [token, bias] : o.logit_bias) {
        require(token >= 0, "a token id in logit_bias must not be negative");
        require(bias < INFINITY, "a number in logit_bias must be finite, or -infinity for never");
    }
}

bool Sampler::penalises() const {
    return options_.repeat_last_n != 0 && (options_.repeat_penalty != 1 || options_.frequency_penalty != 0 ||
                                           options_.presence_penalty != 0);
}

void Sampler::accept(std::span<const int32_t> tokens) {
    if (const int64_t last = options_.dry.penalty_last_n; options_.dry.multiplier > 0 && last != 0) {
        dry_history_.insert(dry_history_.end(), tokens.begin(), tokens.end());
        const int64_t over = last < 0 ? 0 : int64_t(dry_history_.size()) - last;
        if (over > 0) dry_history_.erase(dry_history_.begin(), dry_history_.begin() + over);
    }
    if (!penalises()) return;
    const int64_t most = options_.repeat_last_n;
    if (most > 0 && int64_t(tokens.size()) > most) tokens = tokens.last(size_t(most));
    for (const int32_t token : tokens) {
        ++counts_[token];
        if (most < 0) continue;
        history_.push_back(token);
        if (int64_t(history_.size()) <= most) continue;
        const auto oldest = counts_.find(history_.front());
        if (--oldest->second == 0) counts_.erase(oldest);
        history_.pop_front();
    }
}

namespace {

void require_wide_enough(std::span<const uint32_t> mask, size_t n) {
    if (!mask.empty() && mask.size() < (n + 31) / 32)
        fail(ErrorCode::argument, "a mask for ", n, " tokens needs ", (n + 31) / 32,
             " words of 32 bits, it has ", mask.size());
}

void rule_out(std::span<const uint32_t> mask, std::span<float> row) {
    if (!mask.empty())
        for (size_t i = 0; i < row.size(); ++i) row[i] = mask[i / 32] >> (i % 32) & 1 ? row[i] : -INFINITY;
}

/// The logit of a token in a row of all tokens, or of these; null: it is not there.
float* find(std::span<float> row, std::span<const int32_t> ids, int32_t token) {
    if (ids.empty()) return token >= 0 && size_t(token) < row.size() ? &row[size_t(token)] : nullptr;
    const auto at = std::ranges::lower_bound(ids, token);
    return at != ids.end() && *at == token ? &row[size_t(at - ids.begin())] : nullptr;
}

}  // namespace

/// Whether bias or penalties may make a logit larger, or a bias is for another vocabulary.
bool Sampler::raises(int64_t n_vocab) const {
    const SamplerOptions& o = options_;
    return o.repeat_penalty < 1 || o.frequency_penalty < 0 || o.presence_penalty < 0 ||
           std::ranges::any_of(
               o.logit_bias, [&](const auto& one) { return one.first >= n_vocab || !(one.second <= 0); });
}

/// A token that is lowered makes room for one more.
int64_t Sampler::n_deciding(int64_t n_vocab) const {
    const bool by_rank = options_.top_k > 0 && options_.top_n_sigma == 0 && options_.mirostat == 0;
    if (raises(n_vocab) || !(options_.temperature == 0 || by_rank)) return 0;
    size_t lowered = options_.logit_bias.size() + counts_.size();
    if (!dry_history_.empty()) lowered += repetitions(dry_history_, options_.dry).size();
    const int64_t chosen_from = options_.temperature == 0 ? 1 : options_.top_k;
    constexpr int64_t most = Backend::kMaxLargest;
    return chosen_from <= most && int64_t(lowered) <= most - chosen_from ? chosen_from + int64_t(lowered) : 0;
}

/// The logits with mask, bias and penalties, in `row`; the logits themselves where nothing changes them.
std::span<const float> Sampler::changed(std::span<const float> logits, std::span<const int32_t> ids,
                                        std::span<const uint32_t> mask, std::vector<float>& row) const {
    require_wide_enough(mask, logits.size());
    if (mask.empty() && options_.logit_bias.empty() && counts_.empty() && dry_history_.empty()) return logits;
    row.assign(logits.begin(), logits.end());
    rule_out(mask, row);
    for (const auto& [token, bias] : options_.logit_bias) {
        float* const logit = find(row, ids, token);
        if (!logit && ids.empty())
            fail(ErrorCode::argument, "logit_bias names token ", token, ", the vocabulary has ", row.size());
        if (logit) *logit += bias;
    }
    penalise(row, ids);
    return row;
}

void Sampler::penalise(std::span<float> row, std::span<const int32_t> ids) const {
    for (const auto& [token, count] : counts_) {
        float* const logit = find(row, ids, token);
        if (!logit) continue;
        *logit = *logit > 0 ? *logit / options_.repeat_penalty : *logit * options_.repeat_penalty;
        *logit -= float(count) * options_.frequency_penalty + options_.presence_penalty;
    }
    if (dry_history_.empty()) return;
    for (const auto& [token, length] : repetitions(dry_history_, options_.dry))
        if (float* const logit = find(row, ids, token))
            *logit = float(double(*logit) - dry_penalty(options_.dry, length));
}

/// Uniform in [0, 1), from 53 random bits: std::uniform_real_distribution differs between standard libraries.
double Sampler::random() { return double(random_() >> 11) * 0x1p-53; }

int32_t Sampler::choose(Candidates& candidates) {
    filter(candidates, options_);
    if (options_.xtc_probability > 0 && random() < options_.xtc_probability)
        candidates.drop_top_choices(options_.xtc_threshold);
    return candidates.draw(options_.temperature, random());
}

int32_t Sampler::choose_by_surprise(Candidates& candidates) {
    candidates.keep_surprise(most_surprise_, options_.temperature);
    const int32_t token = candidates.draw(options_.temperature, random());
    const double surprise = candidates.surprise(token, options_.temperature);
    const double next = most_surprise_ - options_.mirostat_eta * (surprise - options_.mirostat_tau);
    constexpr double kMost = 1e6;  // far more than any token has; infinity minus infinity would be no bound
    most_surprise_ = std::clamp(next, -kMost, kMost);
    return token;
}

int32_t Sampler::sample(std::span<const float> logits, std::span<const uint32_t> mask,
                        SamplerScratch& scratch, std::span<const int32_t> ids) {
    Candidates& candidates = scratch.candidates;
    candidates.reset(changed(logits, ids, mask, scratch.row), ids);
    if (options_.temperature == 0) return candidates.likeliest();
    return options_.mirostat == 2 ? choose_by_surprise(candidates) : choose(candidates);
}

TokenLogprobs token_logprobs(std::span<const float> logits, int32_t token, int64_t n,
                             SamplerScratch& scratch) {
    if (token < 0 || size_t(token) >= logits.size())
        fail(ErrorCode::argument, "token ", token, " is outside the vocabulary of ", logits.size());
    scratch.candidates.reset(logits);
    const double normaliser = scratch.candidates.log_normaliser();
    const auto logprob = [&](int32_t id) { return float(double(logits[size_t(id)]) - normaliser); };
    TokenLogprobs result{logprob(token), {}};
    if (n <= 0) return result;
    scratch.candidates.keep_top_k(n);
    for (const int32_t id : scratch.candidates.ranked()) result.top.emplace_back(id, logprob(id));
    return result;
}

namespace {

/// A row without what the mask rules out, and without the joint tokens or those before them.
std::span<const float> left_of(const RowToSample& row, SamplerScratch& scratch) {
    require_wide_enough(row.mask, row.logits.size());
    scratch.left.assign(row.logits.begin(), row.logits.end());
    const std::span<float> all = scratch.left;
    rule_out(row.mask, all);
    const std::span<float> before = all.first(std::min(size_t(row.joint_from), all.size()));
    const std::span<float> joint = all.subspan(before.size());
    if (before.empty() || joint.empty() || std::ranges::max(joint) == -INFINITY) return all;
    scratch.candidates.reset(joint);
    if (scratch.candidates.log_normaliser() > double(std::ranges::max(before)))
        std::ranges::fill(before, -INFINITY);
    return all;
}

}  // namespace

std::vector<Choice> sample_rows(std::span<const RowToSample> rows, std::span<SamplerScratch> scratch,
                                const Parallel& parallel) {
    std::set<const Sampler*> seen;
    for (const RowToSample& row : rows)
        if (!seen.insert(row.sampler).second)
            fail(ErrorCode::argument, "a sampler is listed twice: each row needs one of its own");
    std::vector<Choice> choices(rows.size());
    parallel(int64_t(rows.size()), [&](int64_t item, int thread) {
        const RowToSample& row = rows[size_t(item)];
        SamplerScratch& own = scratch[size_t(thread)];
        Choice& choice = choices[size_t(item)];
        try {
            const bool joint = row.joint_from >= 0;
            const std::span<const float> logits = joint ? left_of(row, own) : row.logits;
            const auto mask = joint ? std::span<const uint32_t>() : row.mask;
            choice.token = row.sampler->sample(logits, mask, own, row.ids);
            if (row.n_logprobs > 0)
                choice.logprobs = token_logprobs(logits, choice.token, row.n_logprobs, own);
        } catch (...) {
            choice.error = std::current_exception();
        }
    });
    return choices;
}

}  // namespace slimrt
