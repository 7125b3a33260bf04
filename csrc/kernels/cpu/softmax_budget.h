// Which softmax weights a budget of sparse attention skips. For the units compiled once per ISA.
#pragma once

#include "kernels/cpu/simd.h"

namespace slimrt::cpu::SLIMRT_ISA {
namespace {

/// What a budget counts: weights, or their squares.
struct ByWeight {
    Vec operator()(Vec weights) const { return weights; }
    float weight(float counted) const { return counted; }
};
struct BySquare {
    Vec operator()(Vec weights) const { return weights * weights; }
    float weight(float counted) const { return __builtin_sqrtf(counted); }
};

/// fn(counted) for vectors of n weights; the last is padded with zeros.
template <class Counts, class Fn>
inline void each_vector(const float* p, int64_t n, const Counts& counts, const Fn& fn) {
    for (int64_t i = 0; i < n; i += lanes) fn(counts(n - i < lanes ? load_part(p + i, n - i) : load(p + i)));
}

template <class Counts>
inline float total_of(const float* p, int64_t n, const Counts& counts) {
    Vec total = splat(0);
    each_vector(p, n, counts, [&](Vec some) { total = total + some; });
    return sum(total);
}

/// The largest threshold found for which the weights below it add up to at most `budget`, as counted.
template <class Counts>
float skip_threshold(const float* p, int64_t n, float budget, const Counts& counts) {
    constexpr float kSafe = 0.999f;                    // of the budget, for rounding errors of the sums
    constexpr float kCoarse = 8, kFine = 1.29683955f;  // 8^(1/8); 8^7 is more than there are rows
    constexpr int kLevels = 7;
    budget *= kSafe;
    float levels[kLevels], cut = budget / static_cast<float>(n);  // n below this are below the budget
    for (int pass = 0; pass < 2; ++pass) {
        Vec below_level[kLevels];
        for (int k = 0; k < kLevels; ++k) {
            levels[k] = (k ? levels[k - 1] : cut) * (pass ? kFine : kCoarse);
            below_level[k] = splat(0);
        }
        each_vector(p, n, counts, [&](Vec some) {
            for (int k = 0; k < kLevels; ++k) below_level[k] = below_level[k] + below(some, splat(levels[k]));
        });
        for (int k = 0; k < kLevels && sum(below_level[k]) <= budget; ++k) cut = levels[k];
    }
    return counts.weight(cut);
}

}  // namespace
}  // namespace slimrt::cpu::SLIMRT_ISA
