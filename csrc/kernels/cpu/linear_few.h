// Products of quantised weights with min_few to max_few tokens: `lanes` rows are unpacked side by side in
// registers, where they meet every token, so that memory and the dot products are busy at the same time.
#pragma once

#include "kernels/cpu/linear_quant.h"
#include "kernels/cpu/linear_unpack.h"

namespace slimrt::cpu::SLIMRT_ISA {

template <class Weight>
constexpr int64_t min_few = large<Weight> ? 3 : 2;
/// Else panels: for groups of 16 signed ones take as long with 4 tokens, and less with more (docs/arm.md).
template <class Weight>
constexpr int64_t max_few =
    few_in_registers && !is_rare<Weight> && (ByElement::n == 1 || Weight::group != 16) ? 8
                                                                                       : min_few<Weight> - 1;

/// What unpack() feeds: T tokens' sums for `lanes` rows.
template <class Weight, int T>
struct FewTokens {
    static constexpr int quads = Weight::group / 4, groups = Weight::block / Weight::group;

    const Activations first;  // token 0; token t is t * stride further
    const size_t stride;
    float (*const scales)[lanes], (*const minima)[lanes];  // of a block
    int64_t block;
    Ahead ahead;  // the next rows
    Vec acc[T];

    void scale(int group, Vec s) { store(scales[group], s); }
    void minimum(int group, Vec m) { store(minima[group], m); }
    void fours(int at, const Words (&codes)[8]) {
        ahead.some(lanes * sizeof(typename Weight::Block) * 32 / Weight::block);
#pragma GCC unroll 2
        for (int i = 0; i < 8; i += quads) add_group((at + i) / quads, codes + i);
    }

  private:
    const uint8_t* next(const uint8_t* p) const { return step(p, stride); }  // token

    template <class Ops>
    static void dots(const Words* codes, const uint8_t* const (&x)[T], PanelSums (&s)[T]) {
#pragma GCC unroll 8
        for (int q = 0; q < quads; ++q) {
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t)
                s[t] = Ops::template dot_four<Weight::is_wide>(s[t], codes[q], x[t] + 4 * q);
        }
    }

    /// The same by sums of pairs.
    template <class Pairs>
    static void dots_by_pairs(const Words* codes, const uint8_t* const (&x)[T], PanelSums (&s)[T]) {
        constexpr int n = fours_in_pairs<Weight>;
#pragma GCC unroll 4
        for (int first = 0; first < quads; first += n) {
            Pairs p[T];
#pragma GCC unroll 8
            for (int q = first; q < first + n; ++q) {
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t) {
                    const PanelCodes four = splat_four(x[t] + 4 * q);
                    p[t] = q == first ? Pairs::of(codes[q], four) : p[t].plus(codes[q], four);
                }
            }
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) s[t] = p[t].added_to(s[t]);
        }
    }

    template <class Ops>
    static void dots_by_element(const Words* codes, const uint8_t* const (&x)[T], PanelSums (&s)[T]) {
#pragma GCC unroll 2
        for (int q = 0; q < quads; q += Ops::n) {
            typename Ops::Codes some[T];
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) some[t] = Ops::load(x[t] + 4 * q, 0);
#pragma GCC unroll 4
            for (int i = 0; i < Ops::n; ++i) {
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t)
                    s[t] = Ops::template dot<Weight::is_wide>(s[t], Ops::of_words(codes[q + i]), some[t], i);
            }
        }
    }

    /// Codes of group g of the block.
    void add_group(int g, const Words* codes) {
        constexpr int32_t none = first_sum;
        const int64_t at = block * groups + g;
        const uint8_t* x[T] = {first.codes + 4 * at * quads};
#pragma GCC unroll 8
        for (int t = 1; t < T; ++t) x[t] = next(x[t - 1]);
        const uint8_t* sums = first.sums + 4 * at;
        PanelSums s[T];
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t, sums = next(sums))
            s[t] = start_all(Weight::offset == 0 ? static_cast<const void*>(&none) : sums);
        if constexpr (ByElement::n > 1)
            dots_by_element<ByElement>(codes, x, s);
        else if constexpr (fours_in_pairs<Weight> > 1)
            dots_by_pairs<PanelPairs>(codes, x, s);
        else
            dots<ByElement>(codes, x, s);
        const Vec of_rows = load(scales[g]);
        const uint8_t* d = first.scales + at * Weight::group / 32 * 4;
        sums = first.sums + 4 * at;
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t, d = next(d), sums = next(sums)) {
            acc[t] = fma(to_vec(s[t]), of_rows * splat(f32_at(d)), acc[t]);
            if constexpr (Weight::has_min) acc[t] = fma(load(minima[g]), splat(f32_at(sums)), acc[t]);
        }
    }
};

/// `lanes` rows times T tokens.
template <class Weight, int T>
[[gnu::flatten]] static void few_product(const uint8_t* w, size_t w_stride, const uint8_t* x, size_t x_stride,
                                         int64_t k, float* out, size_t out_stride) {
    using Block = typename Weight::Block;
    alignas(64) float scales[Weight::block / Weight::group][lanes];
    alignas(64) float minima[Weight::has_min ? Weight::block / Weight::group : 1][lanes];
    const uint8_t* const next = w + lanes * w_stride;
    FewTokens<Weight, T> tokens{Activations(x, k), x_stride, scales, minima, 0, {next, next}, {}};
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) tokens.acc[t] = splat(0);
    for (; tokens.block < k / Weight::block; ++tokens.block) {
        unpack(RowsAt{w + tokens.block * static_cast<int64_t>(sizeof(Block)), w_stride},
               static_cast<const Block*>(nullptr), tokens);
    }
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) store(out + t * out_stride, tokens.acc[t]);
}

using FewProduct = void (*)(const uint8_t* w, size_t w_stride, const uint8_t* x, size_t x_stride, int64_t k,
                            float* out, size_t out_stride);

/// As many rows as there are `lanes` of; returns the row it ended at.
template <class Weight>
static int64_t product_of_few(const uint8_t* w, size_t w_stride, int64_t n_rows, const uint8_t* x,
                              size_t x_stride, int64_t n_tokens, int64_t k, float* out, size_t out_stride) {
    constexpr int least = min_few<Weight>;
    static_assert(max_few<Weight> == 8);
    static constexpr FewProduct of_tokens[] = {
        few_product<Weight, least>, few_product<Weight, 3>, few_product<Weight, 4>, few_product<Weight, 5>,
        few_product<Weight, 6>,     few_product<Weight, 7>, few_product<Weight, 8>};
    int64_t r = 0;
    for (; r + lanes <= n_rows; r += lanes)
        of_tokens[n_tokens - 2](w + r * w_stride, w_stride, x, x_stride, k, out + r, out_stride);
    return r;
}

}  // namespace slimrt::cpu::SLIMRT_ISA
