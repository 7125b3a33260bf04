// Softmax weights as integers, for products of absorbed rows of codes. For the units compiled once per ISA.
#pragma once

#include "kernels/cpu/attention_tiles.h"

namespace slimrt::cpu::SLIMRT_ISA {
namespace {

constexpr bool few_bits = sizeof(WeightCode) == 1;  // of weights
constexpr int64_t kStripColumns = absorbed_vectors * lanes;
constexpr int64_t kStripLanes = kAbsorbedRows / rows_in_lane;

/// fn(row, end) for the rows of each block.
template <class Fn>
void each_block(const AbsorbedValues& x, const Fn& fn) {
    for (int64_t row = x.first, end, last = x.first + x.n; row < last; row = end) {
        end = row / kBlockTokens * kBlockTokens + kBlockTokens;
        if (end > last) end = last;
        fn(row, end);
    }
}

inline const char* head_of(const AbsorbedValues& x, int64_t block, int64_t group) {
    return static_cast<const char*>(x.blocks[block]) + group * x.head_stride;
}

/// The weights of all pairs as integers, times the scales of rows of codes.
class Weights {
  public:
    explicit Weights(const AbsorbedValues& x) : x_(x), stride_((x.n_pairs + 15) / 16 * 16) {
        tops_ = x.weights;
        highs_ = tops_ + stride_;
        units_ = highs_ + kBlockTokens * stride_;
        shrinks_ = units_ + stride_;
        shorts_ = reinterpret_cast<int16_t*>(shrinks_ + stride_);
        codes_ = reinterpret_cast<WeightCode*>(shorts_ + stride_ * kAbsorbedRows);
        offsets_ = all_offsets_ = reinterpret_cast<float*>(codes_ + stride_ * kAbsorbedRows);
        asides_ = all_offsets_ + stride_ * kMostOffsets;
        for (int64_t pair = x.n_pairs; pair < stride_; ++pair) tops_[pair] = 0;
        for (int64_t pair = 0; pair < x.n_pairs; ++pair) {
            const float* const p = x.p + pair * kAbsorbedRows;
            float high[kBlockTokens];
            tops_[pair] = shorten(p, x.rows, shorts_ + pair * kAbsorbedRows, high);
            if constexpr (few_bits)
                for (int64_t i = 0; i < kBlockTokens; ++i) highs_[i * stride_ + pair] = high[i];
        }
    }

    const WeightCode* codes(int64_t pair) const { return codes_ + pair * kAbsorbedRows; }
    float unit(int64_t pair) const { return units_[pair]; }
    /// What a pair's sums have beside the products.
    float offset(int64_t pair) const { return offsets_[pair]; }
    /// What is set aside, times its row's scale.
    float aside(int64_t i) const { return asides_[i]; }

    /// What rows have in all columns of a group, times the weights: of `lanes` groups,
    /// [group][kAbsorbedRows], 0 where no row is.
    void find_offsets(const float* of_rows) {
        static_assert(lanes % 4 == 0 && lanes <= kMostOffsets);
        const auto p = rows_from(x_.p, kAbsorbedRows * sizeof(float));
        for (int64_t g = 0; g < lanes; g += 4)
            dots<4>(of_rows + g * kAbsorbedRows, kAbsorbedRows, p, x_.n_pairs, x_.rows, 1, false,
                    all_offsets_ + g * stride_, static_cast<size_t>(stride_));
        for (int64_t i = 0, pair = 0; i < x_.n_aside; ++i) {
            const SetAside& aside = x_.aside[i];
            while (x_.pairs[pair] != aside.pair) ++pair;
            for (int64_t g = 0; g < lanes; ++g)
                all_offsets_[g * stride_ + pair] += aside.weight * of_rows[g * kAbsorbedRows + aside.row];
        }
    }
    void take_offsets(int64_t group) { offsets_ = all_offsets_ + group * stride_; }

    /// scales: of all rows, 0 where no row is.
    void round(const float* scales) {
        alignas(64) float high[kBlockTokens];
        alignas(64) int16_t shorts[kAbsorbedRows];
        const float top = shorten(scales, x_.rows, shorts, high);
        find_units(top, high);
        for (int64_t i = 0; i < x_.n_aside; ++i) asides_[i] = x_.aside[i].weight * scales[x_.aside[i].row];
        for (int64_t pair = 0; pair < x_.n_pairs; ++pair)
            round_pair(shorts_ + pair * kAbsorbedRows, shorts, shrinks_[pair], x_.rows,
                       codes_ + pair * kAbsorbedRows);
    }

  private:
    static constexpr float kOne = 32767;

    /// Numbers that are not negative, their largest being kOne. Returns what that is, NaN if one is no
    /// number, and the largest of rows of the same place in a block.
    static float shorten(const float* from, int64_t rows, int16_t* to, float* high) {
        Vec top = splat(0), total = splat(0);
        for (int64_t i = 0; i < kBlockTokens; i += lanes) {
            Vec some = splat(0);
            for (int64_t j = i; j < rows; j += kBlockTokens) {
                const Vec one = load(from + j);
                some = max(one, some);
                total = total + one;
            }
            store(high + i, some);
            top = max(some, top);
        }
        const float largest = max_of(top);
        const bool usable = largest >= 0x1p-100f && largest <= 0x1p100f;
        const Vec shrink = splat(usable ? kOne / largest : 0);
        for (int64_t i = 0; i < rows; i += 2 * lanes)
            store_factors(to + i, load(from + i) * shrink, load(from + i + lanes) * shrink);
        return (usable ? largest : largest < 1 ? 0 : __builtin_nanf("")) + 0 * sum(total);
    }

    /// What a pair's products are multiplied with before, so that they are codes, and what codes are worth.
    void find_units(float top, const float* high) {
        constexpr float kTwice = kOne * kOne / 0x1p15f;  // the product of what is largest in both
        const Vec all = splat(top / kTwice);
        for (int64_t pair = 0; pair < x_.n_pairs; pair += lanes) {
            const Vec tops = load(tops_ + pair);
            Vec unit = all * tops;
            if constexpr (few_bits) {
                Vec largest = splat(0);
                for (int64_t i = 0; i < kBlockTokens; ++i)
                    largest = max(load(highs_ + i * stride_ + pair) * splat(high[i]), largest);
                const Vec exact = splat(0x1p15f * max_weight / kTwice) * tops * splat(top) / largest;
                // At least 1: a pair without weights to speak of has no unit either.
                const Vec shrink = max(round_even(min(exact, splat(kOne))), splat(1));
                store(shrinks_ + pair, shrink);
                unit = unit * splat(0x1p15f) / shrink;
            }
            store(units_ + pair, unit);
        }
    }

    static void round_pair(const int16_t* p, const int16_t* scales, float shrink, int64_t rows,
                           WeightCode* to) {
        const RowFactors less = splat_factor(few_bits ? static_cast<int16_t>(shrink) : int16_t(0));
#pragma GCC unroll 4
        for (int64_t i = 0; i < rows; i += 4 * lanes) {
            RowFactors weights[2];
            for (int j = 0; j < 2; ++j) {
                const int64_t at = i + j * 2 * lanes;
                weights[j] = multiplied(load_factors(p + at), load_factors(scales + at));
                if constexpr (few_bits) weights[j] = multiplied(weights[j], less);
            }
            store_weights(to + i, weights[0], weights[1]);
        }
    }

    const AbsorbedValues& x_;
    int64_t stride_;
    float *tops_, *highs_, *units_, *shrinks_, *all_offsets_, *offsets_, *asides_;
    int16_t* shorts_;
    WeightCode* codes_;
};

}  // namespace
}  // namespace slimrt::cpu::SLIMRT_ISA
