// Products of quantised weights with a few tokens (min_few to max_few): `lanes` rows are unpacked side by
// side in registers and multiplied with every token at once, so that memory and arithmetic overlap.
#pragma once

#include "kernels/cpu/linear_quant.h"
#include "kernels/cpu/linear_unpack.h"

namespace slimrt::cpu::SLIMRT_ISA {

template <class Weight>
constexpr int min_few = is_interleaved<Weight>    ? 1
                        : is_memory_bound<Weight> ? 3
                                                  : 2;
/// More tokens take panels. On ARM groups of 16 take panels from the start: signed ones take as long with 4
/// tokens, and less with more (docs/arm.md).
template <class Weight>
constexpr int max_few = few_in_registers && !is_rare<Weight> && (ByElement::n == 1 || Weight::group != 16) ? 8
                        : is_interleaved<Weight> ? few_in_registers
                                                 : min_few<Weight> - 1;
template <class Weight>
constexpr int64_t rows_of_few = is_interleaved<Weight> ? kInterleavedRows : lanes;
template <int n, int least, int most>
constexpr int clamped = n < least  ? least
                        : n > most ? most
                                   : n;

/// The sink of unpack(): sums of T tokens for `lanes` rows.
template <class Weight, int T>
struct FewTokens {
    static constexpr int group_quads = Weight::group / 4, groups = Weight::block / Weight::group;

    const Activations first;  // token 0; token t is t * stride bytes further
    const size_t stride;
    float (*const scales)[lanes], (*const minima)[lanes];  // of a block, by group
    int64_t block;
    SequentialPrefetch ahead;  // prefetch of the rows read next
    Vec acc[T];

    void scale(int group, Vec s) { store(scales[group], s); }
    void minimum(int group, Vec m) { store(minima[group], m); }
    void quads(int at, const Words (&codes)[8]) {
        ahead.advance(lanes * sizeof(typename Weight::Block) * 32 / Weight::block);
#pragma GCC unroll 2
        for (int i = 0; i < 8; i += group_quads) add_group((at + i) / group_quads, codes + i);
    }

  private:
    const uint8_t* next(const uint8_t* p) const { return step(p, stride); }  // of the next token

    template <class Ops>
    static void dots(const Words* codes, const uint8_t* const (&x)[T], PanelSums (&s)[T]) {
#pragma GCC unroll 8
        for (int q = 0; q < group_quads; ++q) {
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t)
                s[t] = Ops::template dot_quad<Weight::is_wide>(s[t], codes[q], x[t] + 4 * q);
        }
    }

    /// The same, adding products of two quads in 16 bits first.
    template <class Pairs>
    static void dots_by_pairs(const Words* codes, const uint8_t* const (&x)[T], PanelSums (&s)[T]) {
        constexpr int n = quads_per_pair<Weight>;
#pragma GCC unroll 4
        for (int first = 0; first < group_quads; first += n) {
            Pairs p[T];
#pragma GCC unroll 8
            for (int q = first; q < first + n; ++q) {
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t) {
                    const PanelCodes four = splat_quad_codes(x[t] + 4 * q);
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
        for (int q = 0; q < group_quads; q += Ops::n) {
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

    /// Adds the codes of group g of the block, times the scales of rows and tokens.
    void add_group(int g, const Words* codes) {
        constexpr int32_t none = sum_bias;
        const int64_t at = block * groups + g;
        const uint8_t* x[T] = {first.codes + 4 * at * group_quads};
#pragma GCC unroll 8
        for (int t = 1; t < T; ++t) x[t] = next(x[t - 1]);
        const uint8_t* sums = first.sums + 4 * at;
        PanelSums s[T];
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t, sums = next(sums))
            s[t] = splat_sum(Weight::offset == 0 ? static_cast<const void*>(&none) : sums);
        if constexpr (ByElement::n > 1)
            dots_by_element<ByElement>(codes, x, s);
        else if constexpr (quads_per_pair<Weight> > 1)
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

/// `lanes` rows (16 if they are interleaved) times T tokens.
template <class Weight, int T>
[[gnu::flatten]] static void few_product(const uint8_t* w, size_t w_stride, const uint8_t* x, size_t x_stride,
                                         int64_t k, float* out, size_t out_stride, Access access) {
    using Block = typename Weight::Block;
    constexpr int rows = rows_of_few<Weight>;
    alignas(64) float scales[Weight::block / Weight::group][lanes];
    alignas(64) float minima[Weight::has_min ? Weight::block / Weight::group : 1][lanes];
    const uint8_t* const next = is_interleaved<Weight> ? w + access.ahead : w + rows * w_stride;
    FewTokens<Weight, T> tokens{Activations(x, k),         x_stride, scales, minima, 0,
                                {next, next, access.hint}, {}};
    Vec acc[rows / lanes][T];
    for (auto& of_lanes : acc) {
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) of_lanes[t] = splat(0);
    }
    for (; tokens.block < k / Weight::block; ++tokens.block) {
#pragma GCC unroll 1
        for (int r = 0; r < rows; r += lanes) {
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) tokens.acc[t] = acc[r / lanes][t];
            unpack(blocks_at<Weight>(w, w_stride, r, tokens.block), static_cast<const Block*>(nullptr),
                   tokens);
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) acc[r / lanes][t] = tokens.acc[t];
        }
    }
    for (int r = 0; r < rows; r += lanes) {
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) store(out + t * out_stride + r, acc[r / lanes][t]);
    }
}

using FewProduct = void (*)(const uint8_t* w, size_t w_stride, const uint8_t* x, size_t x_stride, int64_t k,
                            float* out, size_t out_stride, Access access);

/// Rows in multiples of rows_of_few, times all tokens in tiles of at most max_few; returns how many rows were
/// done.
template <class Weight>
static int64_t product_of_few(const uint8_t* w, size_t w_stride, int64_t n_rows, const uint8_t* x,
                              size_t x_stride, int64_t n_tokens, int64_t k, float* out, size_t out_stride,
                              Access access) {
    constexpr int least = min_few<Weight>, most = max_few<Weight>, rows = rows_of_few<Weight>;
    static constexpr FewProduct of_tokens[] = {few_product<Weight, least>,
                                               few_product<Weight, clamped<2, least, most>>,
                                               few_product<Weight, clamped<3, least, most>>,
                                               few_product<Weight, clamped<4, least, most>>,
                                               few_product<Weight, clamped<5, least, most>>,
                                               few_product<Weight, clamped<6, least, most>>,
                                               few_product<Weight, clamped<7, least, most>>,
                                               few_product<Weight, most>};
    const int64_t tiles = (n_tokens + most - 1) / most;
    int64_t r = 0;
    for (; r + rows <= n_rows; r += rows) {
        for (int64_t tile = 0; tile < tiles; ++tile) {
            const int64_t t = tile * n_tokens / tiles, end = (tile + 1) * n_tokens / tiles;
            of_tokens[end - t - 1](w + r * w_stride, w_stride, x + t * x_stride, x_stride, k,
                                   out + t * out_stride + r, out_stride, access);
        }
    }
    return r;
}

}  // namespace slimrt::cpu::SLIMRT_ISA
