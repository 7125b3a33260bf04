// The search for the scales of a block of 256 weights. It minimises the squared error of the weights, each
// times its importance: the mean square of the activation that it is multiplied by, if that is known, else 1.
// For activations whose elements are uncorrelated that is the error of the product. (Weighting by the
// weights' own size, tried on the models of models/, moves their predictions further at four bits, and makes
// no consistent difference at five and six.)
//
// A lane of a vector is a group, so that four groups are searched at once. A pass takes the scales as given,
// assigns the best codes, and sums the error and the moments from which the least-squares scales for these
// codes follow; repeating it never increases the error.
#pragma once

#include "kernels/cpu/blocks.h"

namespace slimrt::cpu::SLIMRT_ISA {

constexpr int block_size = 256;
constexpr int passes = 3;  // from each start; a fourth gains 0.2 % of the error
constexpr int rounds = 2;  // of adapting 6-bit (8-bit) scales, then the block's own

static inline Vec clamp(Vec x, float low, float high) { return min(max(x, splat(low)), splat(high)); }
static inline Vec negative(Vec a) { return {-a.v}; }
/// 1 / a, 0 where a is 0.
static inline Vec inverse(Vec a) {
    const Floats zero = {};
    return {a.v != zero ? splat(1.0f).v / a.v : zero};
}
/// x where a < b, y elsewhere and where either is NaN.
static inline Vec where_less(Vec a, Vec b, Vec x, Vec y) { return {a.v < b.v ? x.v : y.v}; }

static inline float as_half(float x) { return half_to_float(float_to_half(x)); }
/// The f16 value nearest to x among those of at least its magnitude.
static inline float half_beyond(float x) {
    const uint16_t half = float_to_half(x);
    const bool short_of = __builtin_fabsf(half_to_float(half)) < __builtin_fabsf(x);
    return half_to_float(static_cast<uint16_t>(half + short_of));
}

/// `lanes` groups of `size` weights: x[i] has element i of each group, w[i] its importance. sum is that of w
/// x, n that of w.
template <int size>
struct Groups {
    Vec x[size], w[size], low, high, sum, n;

    void take(const float* from, const float* importance) {
        sum = n = splat(0.0f);
        for (int i = 0; i < size; i += lanes) {
            for (int group = 0; group < lanes; ++group) {
                x[i + group] = load(from + group * size + i);
                w[i + group] = load(importance + group * size + i);
            }
            transpose(x + i);
            transpose(w + i);
        }
        low = high = x[0];
        for (int i = 0; i < size; ++i) {
            low = min(low, x[i]);
            high = max(high, x[i]);
            sum = sum + w[i] * x[i];
            n = n + w[i];
        }
    }
};

/// The groups of a block that has n.
template <int n>
struct GroupsOfBlock {
    static constexpr int size = block_size / n, count = n / lanes;
    Groups<size> of[count];

    GroupsOfBlock(const float* x, const float* w) {
        for (int i = 0; i < count; ++i) of[i].take(x + i * lanes * size, w + i * lanes * size);
    }
};

/// Over a group's elements x and their codes q, each times its importance: the squared error, and sums for
/// least squares.
struct Moments {
    Vec error = splat(0.0f), q = splat(0.0f), qq = splat(0.0f), qx = splat(0.0f);
};

/// The range of the integer multiples of an f16 unit.
struct Multiples {
    float lowest, highest, extreme;  // the multiple that the largest value gets at first
};

/// Chooses the unit among a few that bring the largest value near the end of the range: the multiples k[i] *
/// unit shall be closest to values[i] in squared errors weighted by `weights`. False: f16 cannot represent
/// it.
template <int n>
bool choose_unit(const float (&values)[n], const float (&weights)[n], Multiples range, float* unit,
                 float (&k)[n]) {
    float largest = 0, best = __FLT_MAX__;
    for (const float v : values)
        if (__builtin_fabsf(v) > __builtin_fabsf(largest)) largest = v;
    *unit = 0;
    for (float& multiple : k) multiple = 0;
    if (__builtin_fabsf(largest) < 0x1p-30f) return true;  // f16 has nothing near but 0
    for (int step = 0; step < 8; ++step) {
        // Not below what the largest value needs, however coarse f16 is there.
        const float u = half_beyond(largest / (range.extreme * (1 - static_cast<float>(step) / 64)));
        float multiples[n], error = 0;
        for (int i = 0; i < n; i += lanes) {
            const Vec v = load(values + i);
            const Vec m = round_even(clamp(v * splat(1 / u), range.lowest, range.highest));
            const Vec e = splat(u) * m - v;
            store(multiples + i, m);
            error += sum(load(weights + i) * e * e);
        }
        if (!(error < best)) continue;  // also where u is infinite
        best = error;
        *unit = u;
        memcpy(k, multiples, sizeof multiples);
    }
    return *unit != 0;
}

}  // namespace slimrt::cpu::SLIMRT_ISA
