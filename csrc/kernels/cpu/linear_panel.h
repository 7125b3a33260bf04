// Products of quantised weights with many tokens: a panel of rows is unpacked and transposed once for all
// tokens, so that a lane is a row and the sum over a group needs no shuffles.
#pragma once

#include "kernels/cpu/linear_quant.h"
#include "kernels/cpu/linear_unpack.h"

namespace slimrt::cpu::SLIMRT_ISA {

/// What the code of panel products depends on: weight types that agree in it share one instance.
template <int group_, bool has_min_, bool has_offset_, bool is_wide_, int fours_>
struct PanelKind {
    static constexpr int group = group_, quads_per_pair = fours_;
    static constexpr bool has_min = has_min_, has_offset = has_offset_, is_wide = is_wide_;
};
template <class Weight>
using KindOf = PanelKind<Weight::group, Weight::has_min, Weight::offset != 0 && ByElement::n == 1,
                         Weight::is_wide && PanelPairs::max != 0, quads_per_pair<Weight>>;

/// The sink of unpack(): writes codes and scales of `lanes` rows of a panel, starting at the first group of a
/// block.
template <class Weight, int V, class Ops>
struct PanelColumn {
    static constexpr bool is_signed = Ops::n > 1;
    uint8_t* codes;
    float *scales, *minima;
    Vec pending;  // the scale of an even group, until that of the next is known

    /// Signed codes in groups of 16: for the first of two groups the difference of the two scales is stored,
    /// see PanelTile.
    void scale(int group, Vec s) {
        const bool joins = is_signed && Weight::group == 16;
        if (joins && group % 2 == 0) {
            pending = s;
            return;
        }
        if (joins) store_rows(scales, group - 1, pending - s);
        store_rows(scales, group, s);
    }
    void minimum(int group, Vec m) { store_rows(minima, group, m); }
    void quads(int at, const Words (&words)[8]) {
        constexpr int together = Ops::side_by_side / 4;
#pragma GCC unroll 8
        for (int i = 0; i < 8; i += together) {
            uint8_t* const to = codes + (at + i) * V * lanes * 4;
            if constexpr (together == 1)
                store_words(to, stored(words[i]));
            else
                Ops::store_words(to, stored(words[i]), stored(words[i + 1]));
        }
    }

  private:
    static Words stored(Words w) {
        if constexpr (is_signed && Weight::offset != 0)
            return subtract_offset(w, Weight::offset);
        else
            return w;
    }
    static void store_rows(float* to, int group, Vec of_rows) {
        float* const first = to + group * V * lanes * Ops::tokens;
        if constexpr (Ops::tokens == 1)
            store(first, of_rows);
        else
            Ops::store_scales(of_rows, first);
    }
};

/// V * lanes rows of up to 256 elements; for ByElement the codes are stored signed.
template <class Kind, int V, class Ops>
struct Panel {
    static constexpr int elements = 256, rows = V * lanes, groups = elements / Kind::group;
    static constexpr int side_by_side = Ops::side_by_side;

    alignas(64) uint8_t codes[elements / side_by_side][rows][side_by_side];
    // The minima follow the scales.
    alignas(64) float scales[groups * (Kind::has_min ? 2 : 1)][rows * Ops::tokens];

    /// Unpacks n elements of the rows from `first_row` on, starting at a block; meanwhile `bytes` of the next
    /// rows are prefetched.
    template <class Weight>
    void fill(const uint8_t* w, size_t w_stride, int64_t first_row, int64_t block, int64_t n,
              SequentialPrefetch& ahead, int64_t bytes) {
        using Block = typename Weight::Block;
        constexpr int block_groups = Weight::block / Weight::group;
        const int64_t share = bytes * Weight::block / (V * n);
        for (int r = 0; r < rows; r += lanes) {
            for (int b = 0; b < n / Weight::block; ++b) {
                const auto from = blocks_at<Weight>(w, w_stride, first_row + r, block + b);
                const int group = b * block_groups, minimum = Weight::has_min ? groups + group : group;
                PanelColumn<Weight, V, Ops> to{codes[b * Weight::block / side_by_side][r],
                                               scales[group] + r * Ops::tokens,
                                               scales[minimum] + r * Ops::tokens};
                unpack(from, static_cast<const Block*>(nullptr), to);
                ahead.advance(share);
            }
        }
    }
    const float* scale(int group) const { return scales[group]; }
    const float* min(int group) const { return scales[groups + group]; }
};

/// Accumulates T tokens times a panel's rows in registers.
template <class Kind, int V, int T, class Ops, bool is_signed = (Ops::n > 1)>
struct PanelTile {
    static constexpr int elements = Kind::group;  // of one add()
    const uint8_t* x;                             // of token 0; token t is t * x_stride bytes further
    size_t x_stride;
    Activations first;  // token 0
    Vec acc[T][V];

    /// Adds group g of the panel, group `at` of the row.
    void add(const Panel<Kind, V, Ops>& panel, int g, int64_t at) {
        constexpr int group_quads = Kind::group / 4;
        constexpr int32_t none = sum_bias;
        PanelSums s[T][V];
        for (int t = 0; t < T; ++t) {
            const void* const start =
                Kind::has_offset ? static_cast<const void*>(first.sums + 4 * at + t * x_stride) : &none;
            for (int v = 0; v < V; ++v) s[t][v] = splat_sum(start);
        }
        for (int q = 0; q < group_quads; q += Kind::quads_per_pair)
            multiply<PanelPairs>(panel, g * group_quads + q, first.codes + 4 * (at * group_quads + q), s);
        for (int t = 0; t < T; ++t) {
            const Vec d = splat(f32_at(first.scales + at * Kind::group / 32 * 4 + t * x_stride));
            for (int v = 0; v < V; ++v) {
                acc[t][v] = fma(to_vec(s[t][v]), load(panel.scale(g) + v * lanes) * d, acc[t][v]);
                if constexpr (Kind::has_min) {
                    const Vec sums = splat(f32_at(first.sums + 4 * at + t * x_stride));
                    acc[t][v] = fma(load(panel.min(g) + v * lanes), sums, acc[t][v]);
                }
            }
        }
    }
    Vec sum(int t, int v) const { return acc[t][v]; }

  private:
    /// Adds quads_per_pair quads of codes from number `quad` of the panel on.
    template <class Pairs>
    void multiply(const Panel<Kind, V, Ops>& panel, int quad, const uint8_t* codes,
                  PanelSums (&s)[T][V]) const {
        constexpr int n = Kind::quads_per_pair;
        if constexpr (n == 1) {
            PanelCodes w[V];
            for (int v = 0; v < V; ++v) w[v] = load_panel(panel.codes[quad][v * lanes]);
            for (int t = 0; t < T; ++t) {
                const PanelCodes four = splat_quad_codes(codes + t * x_stride);
                for (int v = 0; v < V; ++v) s[t][v] = dot<Kind::is_wide>(s[t][v], w[v], four);
            }
        } else {
            Pairs p[T][V];
#pragma GCC unroll 8
            for (int q = 0; q < n; ++q) {
                PanelCodes w[V];
                for (int v = 0; v < V; ++v) w[v] = load_panel(panel.codes[quad + q][v * lanes]);
                for (int t = 0; t < T; ++t) {
                    const PanelCodes four = splat_quad_codes(codes + 4 * q + t * x_stride);
                    for (int v = 0; v < V; ++v)
                        p[t][v] = q == 0 ? Pairs::of(w[v], four) : p[t][v].plus(w[v], four);
                }
            }
            for (int t = 0; t < T; ++t) {
                for (int v = 0; v < V; ++v) s[t][v] = p[t][v].added_to(s[t][v]);
            }
        }
    }
};

/// The same for signed codes. A vector has the sums of Ops::tokens tokens.
template <class Kind, int V, int T, class Ops>
struct PanelTile<Kind, V, T, Ops, true> {
    static constexpr int elements = 32;
    static constexpr int n_t = (T + Ops::tokens - 1) / Ops::tokens, n_v = V * Ops::tokens;
    const uint8_t* x;
    size_t x_stride;
    Activations first;
    Vec acc[n_t][n_v];

    /// Where the number of tokens is odd, the last vector has the last token twice.
    size_t token(int t) const { return t * Ops::tokens * x_stride; }
    size_t next(int t) const { return (t + 1) * Ops::tokens <= T ? x_stride : 0; }

    /// Adds group g of the panel times the activations at `codes`.
    void multiply(const Panel<Kind, V, Ops>& panel, int g, const uint8_t* codes,
                  PanelSums (&s)[n_t][n_v]) const {
#pragma GCC unroll 2
        for (int q = 0; q < Kind::group; q += 4 * Ops::n) {
            typename Ops::Codes x[n_t];
            for (int t = 0; t < n_t; ++t) x[t] = Ops::load(codes + q + token(t), next(t));
            const uint8_t* const of = panel.codes[0][0] + (g * Kind::group + q) * panel.rows;
#pragma GCC unroll 4
            for (int i = 0; i < 4 * Ops::n / panel.side_by_side; ++i) {
                for (int v = 0; v < n_v; ++v) {
                    const PanelCodes w = load_panel(of + i * sizeof panel.codes[0] + v * sizeof w);
                    for (int t = 0; t < n_t; ++t)
                        s[t][v] = Ops::template dot<Kind::is_wide>(s[t][v], w, x[t], i);
                }
            }
        }
    }

    /// Adds elements 32 i ... 32 i + 31 of the panel, elements 32 at ... of the row. Where these are two
    /// groups, the integer sums run on from the first into the second: s1 scale1 + s2 scale2 = s1 (scale1 -
    /// scale2) + (s1 + s2) scale2, and the panel stores that difference.
    void add(const Panel<Kind, V, Ops>& panel, int i, int64_t at) {
        constexpr int groups = 32 / Kind::group;
        PanelSums s[n_t][n_v];
        Vec before[n_t][n_v], scaled[n_t][n_v];  // before: s1
        for (int t = 0; t < n_t; ++t) {
            for (int v = 0; v < n_v; ++v) s[t][v] = Ops::start();
        }
        multiply(panel, i * groups, first.codes + 32 * at, s);
        if constexpr (groups == 2) {
            for (int t = 0; t < n_t; ++t) {
                for (int v = 0; v < n_v; ++v) before[t][v] = computed(to_vec(s[t][v]));
            }
            multiply(panel, i * groups + 1, first.codes + 32 * at + Kind::group, s);
        }
        for (int v = 0; v < n_v; ++v) {
            const Vec scale = load(panel.scale((i + 1) * groups - 1) + v * lanes);
            for (int t = 0; t < n_t; ++t) {
                scaled[t][v] = computed(to_vec(s[t][v]) * scale);
                if constexpr (groups == 2)
                    scaled[t][v] = fma(before[t][v], load(panel.scale(i * groups) + v * lanes), scaled[t][v]);
            }
        }
#pragma GCC unroll 8
        for (int t = 0; t < n_t; ++t) {
            const Vec d = Ops::load_tokens(first.scales + 4 * at + token(t), next(t));
#pragma GCC unroll 8
            for (int v = 0; v < n_v; ++v) {
                acc[t][v] = fma(scaled[t][v], d, acc[t][v]);
#pragma GCC unroll 2
                for (int g = 0; Kind::has_min && g < groups; ++g) {
                    const uint8_t* const of_group = first.sums + 4 * (at * groups + g);
                    const Vec sums = Ops::load_tokens(of_group + token(t), next(t));
                    acc[t][v] = fma(load(panel.min(i * groups + g) + v * lanes), sums, acc[t][v]);
                }
            }
        }
    }
    Vec sum(int t, int v) const {
        const Vec* const of = acc[t / Ops::tokens];
        return Ops::of_token(of[v * Ops::tokens], of[(v + 1) * Ops::tokens - 1], t % Ops::tokens);
    }
};

/// out (+)= the panel times T tokens; it starts at element `first` of the rows.
template <class Kind, int V, int T, class Ops>
[[gnu::noinline]] static void panel_tile(const Panel<Kind, V, Ops>& panel, const uint8_t* x, size_t x_stride,
                                         int64_t first, int64_t k, float* out, size_t out_stride) {
    using Tile = PanelTile<Kind, V, T, Ops>;
    Tile tile{x, x_stride, Activations(x, k)};
    for (auto& of_token : tile.acc) {
        for (Vec& sums : of_token) sums = splat(0);
    }
    const int64_t left = k - first < panel.elements ? k - first : panel.elements;
    for (int i = 0; i < left / Tile::elements; ++i) tile.add(panel, i, first / Tile::elements + i);
    // Unrolled: else the sums are in memory, in the loop above too.
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            float* to = out + t * out_stride + v * lanes;
            store(to, first > 0 ? load(to) + tile.sum(t, v) : tile.sum(t, v));
        }
    }
}

/// V * lanes rows times all tokens, four tokens at a time. The next rows are prefetched evenly meanwhile.
template <class Weight, int V, class Ops>
static void panel_product(const uint8_t* w, size_t w_stride, int64_t first_row, const uint8_t* x,
                          size_t x_stride, int64_t n_tokens, int64_t k, float* out, size_t out_stride) {
    constexpr int64_t max_tile = 4;
    constexpr int64_t unpacking = 4;  // unpacking takes about as long as multiplying 4 tokens
    using Kind = KindOf<Weight>;
    static constexpr decltype(&panel_tile<Kind, V, 1, Ops>) rests[] = {
        panel_tile<Kind, V, 1, Ops>, panel_tile<Kind, V, 2, Ops>, panel_tile<Kind, V, 3, Ops>};
    Panel<Kind, V, Ops> panel;
    const uint8_t* const next = w + (first_row + panel.rows) * w_stride;
    SequentialPrefetch ahead{next, next};
    for (int64_t first = 0; first < k; first += panel.elements) {
        const int64_t n = k - first < panel.elements ? k - first : panel.elements;
        const int64_t bytes =
            n / Weight::block * static_cast<int64_t>(sizeof(typename Weight::Block)) * panel.rows;
        panel.template fill<Weight>(w, w_stride, first_row, first / Weight::block, n, ahead,
                                    bytes * unpacking / (unpacking + n_tokens));
        int64_t t = 0;
        for (; t + max_tile <= n_tokens; t += max_tile) {
            panel_tile<Kind, V, max_tile, Ops>(panel, x + t * x_stride, x_stride, first, k,
                                               out + t * out_stride, out_stride);
            ahead.advance(bytes * max_tile / (unpacking + n_tokens));
        }
        if (t < n_tokens)
            rests[n_tokens - t - 1](panel, x + t * x_stride, x_stride, first, k, out + t * out_stride,
                                    out_stride);
        ahead.advance(bytes * (n_tokens - t) / (unpacking + n_tokens));
    }
}

}  // namespace slimrt::cpu::SLIMRT_ISA
