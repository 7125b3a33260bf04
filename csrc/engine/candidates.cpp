#include "engine/candidates.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "core/error.h"
#include "kernels/cpu/row_scan.h"

namespace slimrt {
namespace {

using cpu::scan_block;
using cpu::scan_blocks;

constexpr double kLog2 = 0.6931471805599453;
constexpr float kColdest = 1e-37f;  // a thread may flush subnormal numbers to 0, and 0 / 0 is NaN

/// An integer that is ordered as x is.
uint32_t ordered(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x + 0.0f);  // -0 becomes 0
    return bits >> 31 ? ~bits : bits | 1u << 31;
}

/// A logit for which e^(logit - top) is certainly below p, and about half of it at least while logits are
/// moderate. Without log(), which libraries round differently.
float logit_below(float top, double p) {
    int exponent = 0;
    std::frexp(p, &exponent);
    return float(top + (exponent - 1) * kLog2 - 0.01 - std::abs(double(top)) * 0x1p-22);
}

/// Natural logarithm of a finite number above 0, by operations that every machine rounds alike: of 2^e m it
/// is e log 2 + 2 artanh((m - 1) / (m + 1)), whose series is cut off below 1e-16.
double portable_log(double x) {
    int exponent = 0;
    double m = std::frexp(x, &exponent);  // [1/2, 1)
    if (m < 0.7071067811865476) m *= 2, --exponent;
    const double z = (m - 1) / (m + 1), square = z * z;  // square < 0.03
    double sum = 0;
    for (int k = 21; k > 0; k -= 2) sum = sum * square + 1.0 / k;
    return exponent * kLog2 + 2 * z * sum;
}

}  // namespace

void Candidates::reset(std::span<const float> logits, std::span<const int32_t> ids) {
    if (logits.empty()) fail(ErrorCode::argument, "there are no logits to sample from");
    row_ = logits;
    whole_ = ids.empty();
    if (!whole_) left_.assign(logits.begin(), logits.end()), ids_.assign(ids.begin(), ids.end());
    maxima_.resize(size_t(scan_blocks(int64_t(logits.size()))));
    cpu::scan_maxima(logits.data(), int64_t(logits.size()), maxima_.data());
    top_ = -INFINITY;
    for (const float largest : maxima_) {
        if (std::isnan(largest))
            fail(ErrorCode::format, "the logits are NaN: the weights (or a logits_processor) are broken");
        top_ = std::max(top_, largest);
    }
    if (top_ == INFINITY)
        fail(ErrorCode::format, "a logit is +infinity: the weights (or a logits_processor) are broken");
    if (top_ == -INFINITY) fail(ErrorCode::argument, "no token is left to choose: every logit is -infinity");
}

int32_t Candidates::likeliest() const {
    const auto x = logits();
    return id(size_t(std::find(x.begin(), x.end(), top_) - x.begin()));
}

std::vector<int32_t> Candidates::ids() const {
    if (!whole_) return ids_;
    std::vector<int32_t> all(row_.size());
    std::iota(all.begin(), all.end(), 0);
    return all;
}

double Candidates::log_normaliser() { return top_ + std::log(exponentials(1)); }

std::vector<int32_t> Candidates::ranked() const {
    std::vector<int32_t> order = ids();
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return row_[a] > row_[b]; });
    return order;
}

double Candidates::surprise(int32_t id, float temperature) {
    temperature = std::max(temperature, kColdest);
    const double below = (double(top_) - double(row_[size_t(id)])) / double(temperature);
    return (portable_log(exponentials(temperature)) + below) / kLog2;
}

void Candidates::keep_top_n_sigma(double deviations) {
    const auto x = logits();
    double n = 0, sum = 0, squares = 0;
    for (const float logit : x)
        if (logit != -INFINITY) ++n, sum += double(logit);
    for (const float logit : x)
        if (logit != -INFINITY) squares += (double(logit) - sum / n) * (double(logit) - sum / n);
    keep_logits_from(float(double(top_) - deviations * std::sqrt(squares / n)));
}

void Candidates::keep_top_k(int64_t k) {
    if (k >= int64_t(logits().size())) return;
    float bound = -INFINITY;
    if (whole_ && k <= int64_t(maxima_.size())) {  // at least k logits reach the k-th largest maximum
        left_.assign(maxima_.begin(), maxima_.end());
        std::nth_element(left_.begin(), left_.begin() + (k - 1), left_.end(), std::greater<>());
        bound = left_[size_t(k - 1)];
    }
    keep_logits_from(bound);
    rank_by_logit();
    keep_keys_until(double(k), false);
}

void Candidates::keep_top_p(double share) {
    const double total = exponentials(1);
    // Tokens below the bound have at most 1 - share together, however many they are.
    keep_logits_from(logit_below(top_, (1 - share) * total / double(logits().size())));
    exponentials(1);
    rank_by_logit();
    keep_keys_until(share * total, true);
}

void Candidates::keep_typical(double share) {
    keep_logits_from(-INFINITY);
    const double total = exponentials(1);
    double mean = 0;  // mean of top - logit; the entropy and each -log p are larger by log(total)
    for (size_t i = 0; i < left_.size(); ++i)
        if (p_[i] > 0) mean += double(p_[i]) * (double(top_) - double(left_[i]));
    mean /= total;
    keys_.resize(left_.size());
    for (size_t i = 0; i < left_.size(); ++i)
        keys_[i] = ~ordered(float(std::abs(double(top_) - double(left_[i]) - mean)));
    keep_keys_until(share * total, true);
    top_ = *std::max_element(left_.begin(), left_.end());
}

void Candidates::keep_min_p(double share) {
    keep_logits_from(logit_below(top_, share));
    exponentials(1);
    size_t kept = 0;
    for (size_t i = 0; i < left_.size(); ++i) {
        left_[kept] = left_[i], ids_[kept] = ids_[i];
        kept += double(p_[i]) >= share;
    }
    left_.resize(kept), ids_.resize(kept);
}

void Candidates::drop_top_choices(double threshold) {
    keep_logits_from(-INFINITY);
    const double least = threshold * exponentials(1);
    const auto is_top = [&](size_t i) { return p_[i] > 0 && double(p_[i]) >= least; };
    size_t stays = left_.size();
    for (size_t i = 0; i < left_.size(); ++i)
        if (is_top(i) && (stays == left_.size() || left_[i] <= left_[stays])) stays = i;
    size_t kept = 0;
    for (size_t i = 0; i < left_.size(); ++i) {
        if (is_top(i) && i != stays) continue;
        left_[kept] = left_[i], ids_[kept++] = ids_[i];
    }
    left_.resize(kept), ids_.resize(kept);
    top_ = *std::max_element(left_.begin(), left_.end());
}

void Candidates::keep_surprise(double bits, float temperature) {
    temperature = std::max(temperature, kColdest);
    // Bound of (top - logit) / temperature.
    const double room = bits * kLog2 - portable_log(exponentials(temperature));
    keep_logits_from(float(double(top_) - double(temperature) * std::max(room, 0.0)));
}

/// Fills p_ (but not for a whole row) and sums_; returns the sum of all.
double Candidates::exponentials(float temperature) {
    const auto x = logits();
    p_.resize(whole_ ? 0 : x.size());
    sums_.resize(size_t(scan_blocks(int64_t(x.size()))));
    cpu::scan_exp(x.data(), int64_t(x.size()), top_, temperature, whole_ ? nullptr : p_.data(), sums_.data());
    return std::accumulate(sums_.begin(), sums_.end(), 0.0);
}

/// In a whole row, blocks whose maximum is below the bound are skipped.
void Candidates::keep_logits_from(float bound) {
    size_t kept = 0;
    if (!whole_) {
        for (size_t i = 0; i < left_.size(); ++i) {
            left_[kept] = left_[i], ids_[kept] = ids_[i];
            kept += left_[i] >= bound;
        }
    } else {
        left_.clear(), ids_.clear();
        for (size_t b = 0; b < maxima_.size(); ++b) {
            if (maxima_[b] < bound) continue;
            const size_t begin = b * scan_block, end = std::min<size_t>(begin + scan_block, row_.size());
            left_.resize(kept + (end - begin)), ids_.resize(kept + (end - begin));
            for (size_t i = begin; i < end; ++i) {
                left_[kept] = row_[i], ids_[kept] = int32_t(i);
                kept += row_[i] >= bound;
            }
        }
    }
    left_.resize(kept), ids_.resize(kept);
    whole_ = false;
}

void Candidates::rank_by_logit() {
    keys_.resize(left_.size());
    std::transform(left_.begin(), left_.end(), keys_.begin(), ordered);
}

/// Keeps the tokens with the largest keys_ until their number, or with by_mass the sum of their p_, reaches
/// the target: a radix selection by eleven bits of the key at a time. Of equal keys the lower ids are kept.
void Candidates::keep_keys_until(double target, bool by_mass) {
    const auto weight = [&](size_t i) { return by_mass ? double(p_[i]) : 1.0; };
    double better = 0;  // weight of the tokens whose keys are larger than `last` can become
    uint32_t last = 0, known = 0;
    constexpr std::pair<int, int> parts[] = {{21, 11}, {10, 11}, {0, 10}};
    for (const auto& [shift, bits] : parts) {
        const uint32_t mask = (1u << bits) - 1;
        buckets_.assign(size_t(mask) + 1, 0);
        for (size_t i = 0; i < keys_.size(); ++i)
            if ((keys_[i] & known) == last) buckets_[keys_[i] >> shift & mask] += weight(i);
        uint32_t at = mask;
        for (; at > 0 && better + buckets_[at] < target; --at) better += buckets_[at];
        last |= at << shift;
        known |= mask << shift;
    }
    size_t kept = 0;
    for (size_t i = 0; i < keys_.size(); ++i) {
        if (keys_[i] < last || (keys_[i] == last && better >= target)) continue;
        if (keys_[i] == last) better += weight(i);
        left_[kept] = left_[i], ids_[kept++] = ids_[i];
    }
    left_.resize(kept), ids_.resize(kept);
}

int32_t Candidates::draw(float temperature, double at) {
    const auto x = logits();
    temperature = std::max(temperature, kColdest);
    double rest = at * exponentials(temperature);
    size_t block = 0;
    while (block < sums_.size() && rest >= sums_[block]) rest -= sums_[block++];
    if (block == sums_.size()) {  // by rounding: the last block with any probability
        rest = INFINITY;
        do --block;
        while (sums_[block] == 0);
    }
    const size_t begin = block * scan_block, size = std::min<size_t>(scan_block, x.size() - begin);
    float p[scan_block];
    double sum;
    cpu::scan_exp(x.data() + begin, int64_t(size), top_, temperature, p, &sum);
    size_t chosen = 0;
    for (size_t i = 0; i < size; ++i) {
        if (p[i] > 0) chosen = i;
        if ((rest -= p[i]) < 0) break;
    }
    return id(begin + chosen);
}

}  // namespace slimrt
