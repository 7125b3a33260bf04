#include "engine/dry.h"

#include <algorithm>
#include <limits>

namespace slimrt {
namespace {

using Breakers = std::vector<std::vector<int32_t>>;

/// The breakers that begin with a token; one of that token alone comes first.
auto beginning_with(const Breakers& sorted, int32_t token) {
    return std::ranges::equal_range(sorted, token, {}, [](const auto& breaker) { return breaker.front(); });
}

/// How many of the newest tokens (newest first) come after the last breaker.
int64_t tokens_since_breaker(std::span<const int32_t> newest, const Breakers& breakers) {
    const int64_t n = int64_t(newest.size());
    for (int64_t at = 0; at < n; ++at) {
        int64_t longest = 0;  // of the breakers that begin here and are complete
        for (const auto& breaker : beginning_with(breakers, newest[at])) {
            const int64_t size = int64_t(breaker.size());
            if (size > longest && size <= at + 1 &&
                std::equal(breaker.rbegin(), breaker.rend(), newest.begin() + (at + 1 - size)))
                longest = size;
        }
        if (longest > 0) return at + 1 - longest;
    }
    return n;
}

}  // namespace

std::unordered_map<int32_t, int64_t> repetitions(std::span<const int32_t> history,
                                                 const DryOptions& options) {
    const std::vector<int32_t> newest(history.rbegin(), history.rend());
    const int64_t n = int64_t(newest.size()), limit = tokens_since_breaker(newest, options.breakers);
    std::unordered_map<int32_t, int64_t> longest;
    // The Z function: how long each suffix agrees with the beginning.
    std::vector<int64_t> common(newest.size(), 0);
    for (int64_t i = 1, begin = 0, end = 0; i < n; ++i) {
        int64_t& size = common[i];
        if (i < end) size = std::min(end - i, common[i - begin]);
        while (i + size < n && newest[size] == newest[i + size]) ++size;
        if (i + size > end) begin = i, end = i + size;
        if (const int64_t length = std::min(size, limit); length >= options.allowed_length) {
            int64_t& most = longest[newest[i - 1]];
            most = std::max(most, length);
        }
    }
    std::erase_if(longest, [&](const auto& found) {
        const auto breakers = beginning_with(options.breakers, found.first);
        return !breakers.empty() && breakers.front().size() == 1;
    });
    return longest;
}

double dry_penalty(const DryOptions& options, int64_t length) {
    constexpr double most = std::numeric_limits<float>::max();
    if (length < options.allowed_length) return 0;
    double penalty = options.multiplier;
    for (int64_t i = options.allowed_length; i < length && penalty < most; ++i) penalty *= options.base;
    return std::min(penalty, most);
}

}  // namespace slimrt
