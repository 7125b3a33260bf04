// Products of F32, F16 and BF16 weights with many tokens: a panel of rows is widened to f32 and transposed
// once for all tokens, so that a lane is a row, an activation is broadcast and no sum crosses lanes.
#pragma once

#include "kernels/cpu/linear_float.h"

namespace slimrt::cpu::SLIMRT_ISA {

constexpr int float_panel_vectors = 2;
// Tokens of the register tile: with 2 vectors of rows 24 accumulators of 32 registers or 10 of 16; 16 beside
// 8 of activations, where an instruction multiplies by an element of a vector (ARM).
constexpr int float_panel_tokens = ByElement::n > 1 ? 8 : registers == 32 ? 12 : 5;
constexpr int64_t float_panel_min = 48;  // with fewer tokens single rows are faster
/// Tokens whose activations (256 elements each) stay in the L2 cache.
constexpr int64_t float_panel_block = 252;

/// V * lanes rows of up to 256 elements, transposed: at[element][row].
template <class Stored, int V>
struct FloatPanel {
    static constexpr int elements = 256, rows = V * lanes;

    alignas(64) float at[elements][rows];

    /// Widens elements [first, first + n) of the rows and transposes them.
    void fill(const uint8_t* w, size_t w_stride, int64_t first, int64_t n) {
        for (int v = 0; v < V; ++v) {
            for (int64_t i = 0; i < n; i += lanes) {
                Vec block[lanes];
                for (int r = 0; r < lanes; ++r) {
                    const uint8_t* row = w + (v * lanes + r) * w_stride;
                    const Stored* from = reinterpret_cast<const Stored*>(row) + first + i;
                    __builtin_prefetch(reinterpret_cast<const uint8_t*>(from) +
                                       rows * w_stride);  // the next panel
                    block[r] = i + lanes <= n ? load(from) : load_part(from, n - i);
                }
                transpose(block);
                for (int e = 0; e < lanes; ++e) store(at[i + e] + v * lanes, block[e]);
            }
        }
    }
};

/// Adds the panel times T tokens, Ops::n elements at a time; returns how many elements were done.
template <class Ops, class Panel, int V, int T>
static inline int64_t multiply_by_element(const Panel& panel, const uint8_t* x, size_t x_stride, int64_t n,
                                          Vec (&to)[T][V]) {
    Vec acc[T][V];  // a copy, which the compiler keeps in registers
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) acc[t][v] = to[t][v];
    }
    int64_t i = 0;
    for (; i + Ops::n <= n; i += Ops::n) {
        typename Ops::Floats a[T];
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) a[t] = Ops::load(reinterpret_cast<const float*>(x + t * x_stride) + i);
#pragma GCC unroll 4
        for (int j = 0; j < Ops::n; ++j) {
#pragma GCC unroll 2
            for (int v = 0; v < V; ++v) {
                const Vec w = load(panel.at[i + j] + v * lanes);
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t) acc[t][v] = Ops::fma(w, a[t], j, acc[t][v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) to[t][v] = acc[t][v];
    }
    return i;
}

/// out (+)= the n first elements of the panel times T tokens.
template <class Stored, int V, int T>
static void float_panel_tile(const FloatPanel<Stored, V>& panel, const uint8_t* x, size_t x_stride, int64_t n,
                             bool accumulate, float* out, size_t out_stride) {
    Vec acc[T][V];
    for (int t = 0; t < T; ++t) {
        for (int v = 0; v < V; ++v) acc[t][v] = splat(0);
    }
    int64_t i = 0;
    if constexpr (ByElement::n > 1) i = multiply_by_element<ByElement>(panel, x, x_stride, n, acc);
    for (; i < n; ++i) {
        Vec w[V];
        for (int v = 0; v < V; ++v) w[v] = load(panel.at[i] + v * lanes);
        for (int t = 0; t < T; ++t) {
            const Vec a = splat(reinterpret_cast<const float*>(x + t * x_stride)[i]);
            for (int v = 0; v < V; ++v) acc[t][v] = fma(w[v], a, acc[t][v]);
        }
    }
    for (int t = 0; t < T; ++t) {
        for (int v = 0; v < V; ++v) {
            float* to = out + t * out_stride + v * lanes;
            store(to, accumulate ? load(to) + acc[t][v] : acc[t][v]);
        }
    }
}

/// One panel, which starts at element `first` of its rows, times all tokens.
template <class Stored, int V>
static void float_panel_tiles(const FloatPanel<Stored, V>& panel, const uint8_t* x, size_t x_stride,
                              int64_t n_tokens, int64_t first, int64_t n, float* out, size_t out_stride) {
    constexpr int tile = float_panel_tokens;
    x += first * sizeof(float);
    int64_t t = 0;
    for (; t + tile <= n_tokens; t += tile) {
        float_panel_tile<Stored, V, tile>(panel, x + t * x_stride, x_stride, n, first > 0,
                                          out + t * out_stride, out_stride);
    }
    for (; t + 4 <= n_tokens; t += 4) {
        float_panel_tile<Stored, V, 4>(panel, x + t * x_stride, x_stride, n, first > 0, out + t * out_stride,
                                       out_stride);
    }
    for (; t < n_tokens; ++t) {
        float_panel_tile<Stored, V, 1>(panel, x + t * x_stride, x_stride, n, first > 0, out + t * out_stride,
                                       out_stride);
    }
}

/// Rows [first_row, ...) in whole panels, ordered so that a block of activations stays in the cache; returns
/// the first row that is left.
template <class Stored, int V>
static int64_t float_product_by_panels(const uint8_t* w, size_t w_stride, int64_t first_row, int64_t n_rows,
                                       const uint8_t* x, size_t x_stride, int64_t n_tokens, int64_t k,
                                       float* out, size_t out_stride) {
    using Panel = FloatPanel<Stored, V>;
    const int64_t end = first_row + (n_rows - first_row) / Panel::rows * Panel::rows;
    Panel panel;
    for (int64_t t = 0; t < n_tokens; t += float_panel_block) {
        const int64_t tokens = n_tokens - t < float_panel_block ? n_tokens - t : float_panel_block;
        for (int64_t first = 0; first < k; first += Panel::elements) {
            const int64_t n = k - first < Panel::elements ? k - first : Panel::elements;
            for (int64_t r = first_row; r < end; r += Panel::rows) {
                panel.fill(w + r * w_stride, w_stride, first, n);
                float_panel_tiles<Stored, V>(panel, x + t * x_stride, x_stride, tokens, first, n,
                                             out + t * out_stride + r, out_stride);
            }
        }
    }
    return end;
}

template <class Stored>
static void float_product(const void* weights, size_t w_stride, int64_t n_rows, const void* activations,
                          size_t x_stride, int64_t n_tokens, int64_t k, float* out, size_t out_stride,
                          Access access) {
    const uint8_t* w = static_cast<const uint8_t*>(weights);
    const uint8_t* x = static_cast<const uint8_t*>(activations);
    int64_t r = 0;
    if (n_tokens >= float_panel_min) {
        r = float_product_by_panels<Stored, float_panel_vectors>(w, w_stride, r, n_rows, x, x_stride,
                                                                 n_tokens, k, out, out_stride);
        if constexpr (__is_same(Stored,
                                float))  // F32 rows are also K and V, whose heads may have 80 columns;
                                         // weights usually have multiples of two vectors
            r = float_product_by_panels<Stored, 1>(w, w_stride, r, n_rows, x, x_stride, n_tokens, k, out,
                                                   out_stride);
    }
    r = float_product_by_rows<Stored, float_rows>(w, w_stride, r, n_rows, x, x_stride, n_tokens, k, out,
                                                  out_stride, access);
    float_product_by_rows<Stored, 1>(w, w_stride, r, n_rows, x, x_stride, n_tokens, k, out, out_stride,
                                     access);
}

}  // namespace slimrt::cpu::SLIMRT_ISA
