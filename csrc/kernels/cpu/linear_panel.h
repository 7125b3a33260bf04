// Products of quantised weights with many tokens: a panel of rows is unpacked once for all tokens, so that a
// lane is a row and the sum over a group of codes needs no shuffles.
#pragma once

#include "kernels/cpu/linear_quant.h"

namespace slimrt::cpu::SLIMRT_ISA {

/// V * lanes rows of up to 256 elements.
template <class Weight, int V>
struct Panel {
    static constexpr int elements = 256, rows = V * lanes, groups = elements / Weight::group;
    using Block = typename Weight::Block;

    alignas(64) uint8_t codes[elements / 4][rows][4];
    alignas(64) float scales[groups * (Weight::has_min ? 2 : 1)][rows];  // then the minima

    /// Unpacks what the rows of k elements hold from element `first` (a multiple of 256) on.
    void fill(const uint8_t* w, size_t w_stride, int64_t first, int64_t k) {
        for (int r = 0; r < rows; r += lanes, w += lanes * w_stride) {
            if constexpr (Weight::unit == Weight::block) fill_scales(w, w_stride, first, r);
            for (int i = 0; i < elements && first + i < k; i += Weight::unit) {
                if constexpr (Weight::unit > Weight::block) {
                    if (first + i + Weight::unit > k) {
                        fill_padded(w, w_stride, first, i, k, r);
                        continue;
                    }
                }
                fill_unit(w + (first + i) / Weight::block * sizeof(Block), w_stride, i, r);
            }
        }
    }
    const float* scale(int group) const { return scales[group]; }
    const float* min(int group) const { return scales[groups + group]; }

    /// What to ask for while unpacking: as many bytes, from here on in the order
    /// of memory, which it reads much faster than pieces of many rows.
    const uint8_t* ahead;

  private:
    static constexpr int step = sizeof(Block) * 64 / Weight::block;

    void fill_scales(const uint8_t* w, size_t w_stride, int64_t first, int to) {
        Scales of_rows[lanes];
        for (int r = 0; r < lanes; ++r)
            of_rows[r] = Weight::scales(reinterpret_cast<const Block*>(w + r * w_stride) + first / elements);
        store_columns(of_rows, scales[0] + to, rows);
    }
    /// Of the `lanes` rows of which the first one's blocks, from element i of the panel on, are here.
    void fill_unit(const uint8_t* blocks, size_t stride, int i, int to) {
        if constexpr (Weight::unit > Weight::block) {
            for (int b = 0; b < blocks_of_unit<Weight>; ++b)
                store(scales[i / Weight::group + b] + to, halves_apart(blocks + b * sizeof(Block), stride));
        }
        for (int j = 0; j < Weight::unit / 64; ++j) {
            Codes part[lanes];
            const uint8_t* row = blocks;
            for (int r = 0; r < lanes; ++r, row += stride) {
                part[r] = Weight::codes(reinterpret_cast<const Block*>(row), j);
                __builtin_prefetch(ahead);
                ahead += step;
            }
            store_transposed(part, codes[(i + 64 * j) / 4][to], sizeof codes[0]);
        }
    }
    /// Of rows that end within a unit.
    void fill_padded(const uint8_t* w, size_t w_stride, int64_t first, int i, int64_t k, int to) {
        Block padded[lanes][blocks_of_unit<Weight>] = {};
        for (int r = 0; r < lanes; ++r)
            unit_at<Weight>(w + r * w_stride, (first + i) / Weight::unit, k, padded[r]);
        fill_unit(reinterpret_cast<const uint8_t*>(padded), sizeof padded[0], i, to);
    }
};

/// T tokens' sums for a panel's rows, while they are in registers.
template <class Weight, int V, int T>
struct PanelTile {
    const uint8_t* x;  // token t is t * x_stride further
    size_t x_stride;
    Activations first;  // token 0
    Vec acc[T][V];

    /// The same for the fours of a group, of which the panel's are from `four` on.
    template <class Ops>
    void multiply_by_element(const Panel<Weight, V>& panel, int four, const uint8_t* codes,
                             PanelSums (&s)[T][V]) const {
#pragma GCC unroll 2
        for (int q = 0; q < Weight::group / 4; q += Ops::n) {
            typename Ops::Codes x[T];
            for (int t = 0; t < T; ++t) x[t] = Ops::load(codes + 4 * q + t * x_stride);
#pragma GCC unroll 4
            for (int i = 0; i < Ops::n; ++i) {
                for (int v = 0; v < V; ++v) {
                    const PanelCodes w = load_panel(panel.codes[four + q + i][v * lanes]);
                    for (int t = 0; t < T; ++t)
                        s[t][v] = Ops::template dot<Weight::is_wide>(s[t][v], w, x[t], i);
                }
            }
        }
    }

    /// Adds group g of the panel, which is group `at` of the row.
    void add_group(const Panel<Weight, V>& panel, int g, int64_t at) {
        constexpr int quads = Weight::group / 4;
        constexpr int32_t none = first_sum;
        PanelSums s[T][V];
        for (int t = 0; t < T; ++t) {
            for (int v = 0; v < V; ++v) {
                s[t][v] = start_all(Weight::offset == 0 ? static_cast<const void*>(&none)
                                                        : first.sums + 4 * at + t * x_stride);
            }
        }
        if constexpr (ByElement::n > 1) {
            multiply_by_element<ByElement>(panel, g * quads, first.codes + 4 * at * quads, s);
        } else {
            for (int q = 0; q < quads; ++q) {
                PanelCodes w[V];
                for (int v = 0; v < V; ++v) w[v] = load_panel(panel.codes[g * quads + q][v * lanes]);
                for (int t = 0; t < T; ++t) {
                    const PanelCodes four = splat_four(first.codes + 4 * (at * quads + q) + t * x_stride);
                    for (int v = 0; v < V; ++v) s[t][v] = dot<Weight::is_wide>(s[t][v], w[v], four);
                }
            }
        }
        for (int t = 0; t < T; ++t) {
            const Vec d = splat(f32_at(first.scales + at * Weight::group / 32 * 4 + t * x_stride));
            for (int v = 0; v < V; ++v) {
                acc[t][v] = fma(to_vec(s[t][v]), load(panel.scale(g) + v * lanes) * d, acc[t][v]);
                if constexpr (Weight::has_min) {
                    const Vec sums = splat(f32_at(first.sums + 4 * at + t * x_stride));
                    acc[t][v] = fma(load(panel.min(g) + v * lanes), sums, acc[t][v]);
                }
            }
        }
    }
};

/// out (+)= the panel, which starts at element `first` of the rows, times T tokens.
template <class Weight, int V, int T>
static void panel_tile(const Panel<Weight, V>& panel, const uint8_t* x, size_t x_stride, int64_t first,
                       int64_t k, float* out, size_t out_stride) {
    PanelTile<Weight, V, T> tile{x, x_stride, Activations(x, k), {}};
    const int64_t left = k - first < panel.elements ? k - first : panel.elements;
    for (int g = 0; g < left / Weight::group; ++g) tile.add_group(panel, g, first / Weight::group + g);
    for (int t = 0; t < T; ++t) {
        for (int v = 0; v < V; ++v) {
            float* to = out + t * out_stride + v * lanes;
            store(to, first > 0 ? load(to) + tile.acc[t][v] : tile.acc[t][v]);
        }
    }
}

/// V * lanes rows times all tokens, four at a time.
template <class Weight, int V>
static void panel_product(const uint8_t* w, size_t w_stride, const uint8_t* x, size_t x_stride,
                          int64_t n_tokens, int64_t k, float* out, size_t out_stride) {
    constexpr int64_t max_tile = 4;
    static constexpr decltype(&panel_tile<Weight, V, 1>) rests[] = {
        panel_tile<Weight, V, 1>, panel_tile<Weight, V, 2>, panel_tile<Weight, V, 3>};
    Panel<Weight, V> panel;
    panel.ahead = w + panel.rows * w_stride;
    for (int64_t first = 0; first < k; first += panel.elements) {
        panel.fill(w, w_stride, first, k);
        int64_t t = 0;
        for (; t + max_tile <= n_tokens; t += max_tile)
            panel_tile<Weight, V, max_tile>(panel, x + t * x_stride, x_stride, first, k, out + t * out_stride,
                                            out_stride);
        if (t < n_tokens)
            rests[n_tokens - t - 1](panel, x + t * x_stride, x_stride, first, k, out + t * out_stride,
                                    out_stride);
    }
}

}  // namespace slimrt::cpu::SLIMRT_ISA
