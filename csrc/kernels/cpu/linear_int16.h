// Products of F16 and BF16 weights with many tokens by 16-bit integers: weights and activations are quantised
// to 14 bits and a sign bit in groups of 32 with an f32 scale, in panels as in linear_panel.h. A value errs
// by at most 1/16382 of the largest of its group; 32 products fit in 32 bits.
#pragma once

#include "kernels/cpu/linear_quant.h"

namespace slimrt::cpu::SLIMRT_ISA {

constexpr int int16_group = 32;
constexpr float int14_max = 8191;  // 32 * 8191 * 8191 < 2^31

/// A packed row of k activations, padded with zeros to a multiple of 32: int16 codes, then an f32 scale for
/// each 32.
static inline size_t int16_packed_bytes(int64_t k) {
    const int64_t groups = (k + int16_group - 1) / int16_group;
    return static_cast<size_t>(groups * (int16_group * 2 + 4));
}

static inline void int16_pack(const float* x, int64_t k, void* out) {
    const int64_t groups = (k + int16_group - 1) / int16_group;
    int16_t* codes = static_cast<int16_t*>(out);
    float* scales = reinterpret_cast<float*>(codes + groups * int16_group);
    for (int64_t g = 0; g < groups; ++g) {
        const int64_t left = k - g * int16_group;
        float from[int16_group] = {};
        memcpy(from, x + g * int16_group, static_cast<size_t>(left < int16_group ? left : int16_group) * 4);
        const float max = largest(from, int16_group), inverse = max > 1e-35f ? int14_max / max : 0;
        for (int i = 0; i < int16_group; ++i)
            codes[g * int16_group + i] = static_cast<int16_t>(nearest_even(from[i] * inverse));
        scales[g] = max / int14_max;
    }
}

/// Rows of up to 256 elements; if there are fewer rows than lanes the last one is repeated.
template <class Stored, class Ops>
struct Int16Panel {
    static constexpr int elements = 256, vectors = 2, rows = vectors * lanes, groups = elements / int16_group;

    alignas(64) int16_t codes[elements / 2][rows][2];
    float scales[groups][rows];

    /// Quantises elements [first, first + n) of n_rows rows, padded with zeros to a multiple of 32.
    void fill(const uint8_t* w, size_t w_stride, int64_t n_rows, int64_t first, int64_t n) {
        for (int r = 0; r < rows; r += lanes) {
            for (int g = 0; g * int16_group < n; ++g) {
                const int64_t at = first + g * int16_group, left = n - g * int16_group;
                fill_group(w, w_stride, n_rows, at, left, g, r);
            }
        }
    }

  private:
    void fill_group(const uint8_t* w, size_t w_stride, int64_t n_rows, int64_t first, int64_t n, int g,
                    int to) {
        Vec columns[int16_group];  // element i of `lanes` rows
        for (int i = 0; i < int16_group; i += lanes) {
            for (int r = 0; r < lanes; ++r) {
                const int64_t row = to + r < n_rows ? to + r : n_rows - 1;
                const Stored* from = reinterpret_cast<const Stored*>(w + row * w_stride) + first + i;
                __builtin_prefetch(reinterpret_cast<const uint8_t*>(from) +
                                   rows * w_stride);  // the next panel
                columns[i + r] = n >= i + lanes ? load(from) : n > i ? load_part(from, n - i) : splat(0);
            }
            transpose(columns + i);
        }
        const Vec max = Ops::largest(columns);
        store(scales[g] + to, max * splat(1 / int14_max));
        const Vec inverse = Ops::inverse(max, int14_max);
        for (int i = 0; i < int16_group; i += 2) {
            Ops::store_pairs(codes[(g * int16_group + i) / 2][to], columns[i] * inverse,
                             columns[i + 1] * inverse);
        }
    }
};

/// out (+)= the first `groups` groups of the panel times T tokens, for n_rows rows.
template <class Stored, class Ops, int T>
static void int16_tile(const Int16Panel<Stored, Ops>& panel, int64_t n_rows, const uint8_t* codes,
                       const uint8_t* scales, size_t x_stride, int groups, bool accumulate, float* out,
                       size_t out_stride) {
    constexpr int V = panel.vectors;
    Vec acc[T][V];
    for (int t = 0; t < T; ++t) {
        for (int v = 0; v < V; ++v) acc[t][v] = splat(0);
    }
    for (int g = 0; g < groups; ++g) {
        typename Ops::Sums sums[T][V] = {};
        for (int p = g * int16_group / 2; p < (g + 1) * int16_group / 2; ++p) {
            typename Ops::Pairs w[V];
            for (int v = 0; v < V; ++v) w[v] = Ops::load_pairs(panel.codes[p][v * lanes]);
            for (int t = 0; t < T; ++t) {
                const typename Ops::Pairs pair = Ops::splat_pair(codes + t * x_stride + 4 * p);
                for (int v = 0; v < V; ++v) sums[t][v] = Ops::dot(sums[t][v], w[v], pair);
            }
        }
        for (int t = 0; t < T; ++t) {
            const Vec scale = splat(f32_at(scales + t * x_stride + 4 * g));
            for (int v = 0; v < V; ++v) {
                const Vec factor = load(panel.scales[g] + v * lanes) * scale;
                acc[t][v] = fma(Ops::to_floats(sums[t][v]), factor, acc[t][v]);
            }
        }
    }
    for (int t = 0; t < T; ++t) {
        for (int v = 0; v < V; ++v) {
            float* to = out + t * out_stride + v * lanes;
            const int64_t n = n_rows - v * lanes;
            if (n >= lanes)
                store(to, accumulate ? load(to) + acc[t][v] : acc[t][v]);
            else if (n > 0)
                store_part(to, accumulate ? load_part(to, n) + acc[t][v] : acc[t][v], n);
        }
    }
}

/// One panel times a block of tokens.
template <class Stored, class Ops>
static void int16_tiles(const Int16Panel<Stored, Ops>& panel, int64_t n_rows, const uint8_t* codes,
                        const uint8_t* scales, size_t x_stride, int64_t n_tokens, int groups, bool accumulate,
                        float* out, size_t out_stride) {
    int64_t t = 0;
    for (; t + Ops::tokens <= n_tokens; t += Ops::tokens) {
        int16_tile<Stored, Ops, Ops::tokens>(panel, n_rows, codes + t * x_stride, scales + t * x_stride,
                                             x_stride, groups, accumulate, out + t * out_stride, out_stride);
    }
    for (; t < n_tokens; ++t) {
        int16_tile<Stored, Ops, 1>(panel, n_rows, codes + t * x_stride, scales + t * x_stride, x_stride,
                                   groups, accumulate, out + t * out_stride, out_stride);
    }
}

template <class Stored, class Ops>
static void int16_product(const void* weights, size_t w_stride, int64_t n_rows, const void* activations,
                          size_t x_stride, int64_t n_tokens, int64_t k, float* out, size_t out_stride,
                          Access) {
    // One panel's width of a block of activations, and its outputs, both stay in the cache.
    constexpr int64_t block = 576 / Ops::tokens * Ops::tokens, row_block = 128;
    const uint8_t* w = static_cast<const uint8_t*>(weights);
    Int16Panel<Stored, Ops> panel;
    for (int64_t t = 0; t < n_tokens; t += block) {
        const int64_t tokens = n_tokens - t < block ? n_tokens - t : block;
        const uint8_t* codes = static_cast<const uint8_t*>(activations) + t * x_stride;
        const uint8_t* scales = codes + (k + int16_group - 1) / int16_group * int16_group * 2;
        for (int64_t row = 0; row < n_rows; row += row_block) {
            const int64_t end = n_rows - row < row_block ? n_rows : row + row_block;
            for (int64_t first = 0; first < k; first += panel.elements) {
                const int64_t n = k - first < panel.elements ? k - first : panel.elements;
                const int groups = static_cast<int>((n + int16_group - 1) / int16_group);
                for (int64_t r = row; r < end; r += panel.rows) {
                    panel.fill(w + r * w_stride, w_stride, n_rows - r, first, n);
                    int16_tiles(panel, n_rows - r, codes + 2 * first, scales + first / int16_group * 4,
                                x_stride, tokens, groups, first > 0, out + t * out_stride + r, out_stride);
                }
            }
        }
    }
}

}  // namespace slimrt::cpu::SLIMRT_ISA
