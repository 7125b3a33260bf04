// Quantises softmax weights, for integer products with absorbed rows of codes. For the units compiled once
// per ISA.
#pragma once

#include "kernels/cpu/attention_tiles.h"

namespace slimrt::cpu::SLIMRT_ISA {
namespace {

constexpr bool int8_weights = sizeof(WeightCode) == 1;  // weights have 8 bits
constexpr int64_t kStripColumns = absorbed_vectors * lanes;
constexpr int64_t kStripLanes = kAbsorbedRows / rows_per_lane;

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

constexpr int64_t kTilePairs = 16;  // (head, query) pairs in a tile
/// Whether rows are transposed as TileKernels multiply them.
constexpr bool fits_tiles = rows_per_lane == 4 && lanes == 16;
/// Whether tiles are used: half empty they are no faster.
inline bool by_tiles(const AbsorbedValues& x) { return fits_tiles && x.tiles && x.n_pairs >= 16; }

/// to[group * stride + pair] = weights and outliers . of_rows [group][kAbsorbedRows], 0 where there is no
/// row, for `lanes` groups.
inline void sum_offsets(const AbsorbedValues& x, const float* of_rows, float* to, int64_t stride) {
    static_assert(lanes % 4 == 0 && lanes <= kMaxOffsets);
    const auto p = rows_from(x.p, kAbsorbedRows * sizeof(float));
    for (int64_t g = 0; g < lanes; g += 4)
        dots<4>(of_rows + g * kAbsorbedRows, kAbsorbedRows, p, x.n_pairs, x.rows, 1, false, to + g * stride,
                static_cast<size_t>(stride));
    for (int64_t i = 0, pair = 0; i < x.n_outliers; ++i) {
        const Outlier& outlier = x.outliers[i];
        while (x.pairs[pair] != outlier.pair) ++pair;
        for (int64_t g = 0; g < lanes; ++g)
            to[g * stride + pair] += outlier.weight * of_rows[g * kAbsorbedRows + outlier.row];
    }
}

/// The weights of all pairs, times the scales of the rows, as integers.
class Weights {
  public:
    explicit Weights(const AbsorbedValues& x) : x_(x), stride_((x.n_pairs + 15) / 16 * 16) {
        tops_ = x.weights;
        highs_ = tops_ + stride_;
        units_ = highs_ + kBlockTokens * stride_;
        shrinks_ = units_ + stride_;
        q15_ = reinterpret_cast<int16_t*>(shrinks_ + stride_);
        codes_ = reinterpret_cast<WeightCode*>(q15_ + stride_ * kAbsorbedRows);
        offsets_ = all_offsets_ = reinterpret_cast<float*>(codes_ + stride_ * kAbsorbedRows);
        outliers_ = all_offsets_ + stride_ * kMaxOffsets;
        listed_ = reinterpret_cast<Outlier*>(outliers_ + stride_ * 2 * kMaxOutliers);
        sums_ = reinterpret_cast<int32_t*>(listed_ + stride_ * 2 * kMaxOutliers);
        for (int64_t pair = x.n_pairs; pair < stride_; ++pair) tops_[pair] = 0;
        for (int64_t pair = 0; pair < x.n_pairs; ++pair) {
            const float* const p = x.p + pair * kAbsorbedRows;
            float high[kBlockTokens], total;
            tops_[pair] = quantise_q15(p, x.rows, q15_ + pair * kAbsorbedRows, high, &total);
            if constexpr (int8_weights)
                for (int64_t i = 0; i < kBlockTokens; ++i) highs_[i * stride_ + pair] = high[i];
        }
    }

    const WeightCode* codes(int64_t pair) const { return codes_ + pair * kAbsorbedRows; }
    float unit(int64_t pair) const { return units_[pair]; }
    /// What is added to the sums of a pair beside the products.
    float offset(int64_t pair) const { return offsets_[pair]; }
    /// What is added in floats, sorted by pair: outliers, and the weights of rows whose scale is one.
    const Outlier* outliers() const { return all_; }
    int64_t n_outliers() const { return n_all_; }
    /// An outlier weight times its row's scale.
    float outlier(int64_t i) const { return outliers_[i]; }
    /// Where tiles sum a vector of columns, from column c of a strip on, for a pair. Of the first of 32 pairs
    /// and of 32 columns it is where TileKernels begin.
    int32_t* sums(int64_t pair, int64_t c) const {
        constexpr int64_t tile = kTilePairs * lanes;
        return sums_ + pair / (2 * kTilePairs) * kTiledSums + c / (2 * lanes) * 4 * tile +
               pair / kTilePairs % 2 * 2 * tile + c / lanes % 2 * tile + pair % kTilePairs * lanes;
    }

    /// offset = weights . (what rows add to all columns of a group), for `lanes` groups, see sum_offsets().
    void find_offsets(const float* of_rows) { sum_offsets(x_, of_rows, all_offsets_, stride_); }
    void take_offsets(int64_t group) { offsets_ = all_offsets_ + group * stride_; }

    /// Quantises weights times scales [row], 0 where there is no row. Beside a scale that stands out, as that
    /// of a token unlike the others, these would be lost, whatever the weight of its row.
    void quantise(const float* scales) {
        constexpr float kLoud = 3;  // times the mean
        alignas(64) int16_t codes[kAbsorbedRows];
        alignas(64) float high[kBlockTokens];
        all_ = x_.outliers;
        n_all_ = x_.n_outliers;
        float total, top = quantise_q15(scales, x_.rows, codes, high, &total);
        if (top * static_cast<float>(x_.n) > kLoud * total) {
            alignas(64) float others[kAbsorbedRows];
            memcpy(others, scales, static_cast<size_t>(x_.rows) * sizeof(float));
            list_loud_rows(others);
            top = quantise_q15(others, x_.rows, codes, high, &total);
        }
        find_units(top, high);
        for (int64_t pair = 0; pair < x_.n_pairs; ++pair)
            quantise_pair(q15_ + pair * kAbsorbedRows, codes, shrinks_[pair], x_.rows,
                          codes_ + pair * kAbsorbedRows);
        for (int64_t i = 0; i < n_all_; ++i) outliers_[i] = all_[i].weight * scales[all_[i].row];
    }

  private:
    static constexpr float kQ15One = 32767;

    /// Quantises numbers >= 0 to Q15, the largest becoming kQ15One. Returns the largest, NaN if one is not
    /// finite; total: their sum; high: the maximum over rows at the same place in a block.
    static float quantise_q15(const float* from, int64_t rows, int16_t* to, float* high, float* total) {
        Vec top = splat(0), all = splat(0);
        for (int64_t i = 0; i < kBlockTokens; i += lanes) {
            Vec some = splat(0);
            for (int64_t j = i; j < rows; j += kBlockTokens) {
                const Vec one = load(from + j);
                some = max(one, some);
                all = all + one;
            }
            store(high + i, some);
            top = max(some, top);
        }
        const float largest = max_of(top);
        const bool usable = largest >= 0x1p-100f && largest <= 0x1p100f;
        const Vec shrink = splat(usable ? kQ15One / largest : 0);
        for (int64_t i = 0; i < rows; i += 2 * lanes)
            store_int16(to + i, load(from + i) * shrink, load(from + i + lanes) * shrink);
        *total = sum(all);
        return (usable ? largest : largest < 1 ? 0 : __builtin_nanf("")) + 0 * *total;
    }

    /// Sets scales that are outliers to 0, and lists the weights of their rows after the outliers of each
    /// pair.
    [[gnu::noinline]] void list_loud_rows(float* scales) {
        Outlier loud[kMaxOutliers];
        WeightStats stats = {};
        const int64_t n_loud = extract_outliers(scales, x_.rows, true, 0, 1, &stats, loud);
        all_ = listed_;
        n_all_ = 0;
        for (int64_t pair = 0, i = 0; pair < x_.n_pairs; ++pair) {
            const int32_t index = x_.pairs[pair];
            for (; i < x_.n_outliers && x_.outliers[i].pair == index; ++i) listed_[n_all_++] = x_.outliers[i];
            for (int64_t j = 0; j < n_loud; ++j)
                listed_[n_all_++] = {index, loud[j].row, x_.p[pair * kAbsorbedRows + loud[j].row]};
        }
    }

    /// The factor in Q15 that maps the product of weights and scales of a pair to WeightCode, and the value
    /// of one code.
    void find_units(float top, const float* high) {
        constexpr float kTwice = kQ15One * kQ15One / 0x1p15f;  // the largest product of two Q15 numbers
        const Vec all = splat(top / kTwice);
        for (int64_t pair = 0; pair < x_.n_pairs; pair += lanes) {
            const Vec tops = load(tops_ + pair);
            Vec unit = all * tops;
            if constexpr (int8_weights) {
                Vec largest = splat(0);
                for (int64_t i = 0; i < kBlockTokens; ++i)
                    largest = max(load(highs_ + i * stride_ + pair) * splat(high[i]), largest);
                const Vec exact = splat(0x1p15f * max_weight / kTwice) * tops * splat(top) / largest;
                // At least 1: a pair whose weights are all 0 has unit 0.
                const Vec shrink = max(round_even(min(exact, splat(kQ15One))), splat(1));
                store(shrinks_ + pair, shrink);
                unit = unit * splat(0x1p15f) / shrink;
            }
            store(units_ + pair, unit);
        }
    }

    static void quantise_pair(const int16_t* p, const int16_t* scales, float shrink, int64_t rows,
                              WeightCode* to) {
        const Int16s less = splat_int16(int8_weights ? static_cast<int16_t>(shrink) : int16_t(0));
#pragma GCC unroll 4
        for (int64_t i = 0; i < rows; i += 4 * lanes) {
            Int16s weights[2];
            for (int j = 0; j < 2; ++j) {
                const int64_t at = i + j * 2 * lanes;
                weights[j] = mul_q15(load_int16(p + at), load_int16(scales + at));
                if constexpr (int8_weights) weights[j] = mul_q15(weights[j], less);
            }
            store_weights(to + i, weights[0], weights[1]);
        }
    }

    const AbsorbedValues& x_;
    int64_t stride_;
    float *tops_, *highs_, *units_, *shrinks_, *all_offsets_, *offsets_, *outliers_;
    Outlier* listed_;
    const Outlier* all_;
    int64_t n_all_;
    int16_t* q15_;
    WeightCode* codes_;
    int32_t* sums_;
};

}  // namespace
}  // namespace slimrt::cpu::SLIMRT_ISA
