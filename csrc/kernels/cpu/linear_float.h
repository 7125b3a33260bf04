// Products of F32, F16 and BF16 weights with f32 activations, summed in f32. Few tokens: row by row (this
// file), limited by memory. Many: panels (linear_float_panel.h).
#pragma once

#include "kernels/cpu/dot.h"

namespace slimrt::cpu::SLIMRT_ISA {

constexpr int float_rows = registers == 32 ? 4 : 2;  // of the register tile
constexpr int64_t float_tokens = 6;

/// R rows times T tokens, each sum in a register of its own.
template <class Stored, int R, int T>
static void float_tile(const uint8_t* w, size_t w_stride, const uint8_t* x, size_t x_stride, int64_t k,
                       float* out, size_t out_stride) {
    Vec acc[T][R];
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
        for (int r = 0; r < R; ++r) acc[t][r] = splat(0);
    }
    const auto row = [=](int r) { return reinterpret_cast<const Stored*>(w + r * w_stride); };
    const auto token = [=](int t) { return reinterpret_cast<const float*>(x + t * x_stride); };
    const auto multiply = [&](const Vec(&weights)[R], int t, Vec activations) {
        for (int r = 0; r < R; ++r) acc[t][r] = fma(weights[r], activations, acc[t][r]);
    };
    Vec weights[R];
    int64_t i = 0;
    for (; i + lanes <= k; i += lanes) {
        for (int r = 0; r < R; ++r) {
            __builtin_prefetch(reinterpret_cast<const uint8_t*>(row(r) + i) + R * w_stride);
            weights[r] = load(row(r) + i);
        }
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) multiply(weights, t, load(token(t) + i));
    }
    if (i < k) {
        for (int r = 0; r < R; ++r) weights[r] = load_part(row(r) + i, k - i);
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) multiply(weights, t, load_part(token(t) + i, k - i));
    }
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) out[t * out_stride + r] = sum(acc[t][r]);
    }
}

/// Accumulators of a row times one token, several to hide the latency of fma. Where registers suffice they
/// span a cache line: prefetching each line twice would be a tenth of the NEON instructions.
template <class Stored, int of_line = 64 / sizeof(Stored) / lanes>
constexpr int float_sums = registers == 32 && of_line > 4 ? of_line : 4;

/// R rows times one token; the rows are R streams.
template <class Stored, int R>
static void float_dots(const uint8_t* w, size_t w_stride, const uint8_t* x, int64_t k, Access access,
                       float* out) {
    constexpr int sums = float_sums<Stored>, bytes = sums * lanes * sizeof(Stored);
    const auto row = [=](int r) { return reinterpret_cast<const Stored*>(w + r * w_stride); };
    const float* token = reinterpret_cast<const float*>(x);
    const PrefetchTarget<R> target(w, w_stride, access);
    Vec acc[R][sums] = {};
    int64_t i = 0;
    for (; i + sums * lanes <= k; i += sums * lanes) {
        const uint8_t* const ahead = target.at(static_cast<size_t>(i) * sizeof(Stored));
        for (int r = 0; r < R; ++r) prefetch<true>(ahead + r * w_stride, bytes, access.hint);
#pragma GCC unroll 8
        for (int s = 0; s < sums; s += vectors_at_once) {
            Vec weights[R][vectors_at_once];
            for (int r = 0; r < R; ++r) load_vectors(row(r) + i + s * lanes, weights[r]);
            for (int j = 0; j < vectors_at_once; ++j) {
                const Vec of_token = load(token + i + (s + j) * lanes);
                for (int r = 0; r < R; ++r) acc[r][s + j] = fma(weights[r][j], of_token, acc[r][s + j]);
            }
        }
    }
    // All loops over sums are unrolled: one that is not has them in memory, in the loop above too.
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
        Vec* const of = acc[r];
        for (int64_t j = i; j + lanes <= k; j += lanes) of[0] = fma(load(row(r) + j), load(token + j), of[0]);
        const int64_t left = (k - i) % lanes;
        if (left > 0)
            of[1] = fma(load_part(row(r) + k - left, left), load_part(token + k - left, left), of[1]);
#pragma GCC unroll 4
        for (int s = 4; s < sums; ++s) of[s - 4] = of[s - 4] + of[s];
        out[r] = sum((of[0] + of[1]) + (of[2] + of[3]));
    }
}

/// R rows times one token: side by side, where access.several, as many as registers allow; they share the
/// loads of activations. Portable code is small instead.
template <class Stored, int R>
static void float_dots_of_tile(const uint8_t* w, size_t w_stride, const uint8_t* x, int64_t k, Access access,
                               float* out) {
    constexpr bool portable = lanes == 4 && registers == 16;
    constexpr int most = portable ? 1 : registers / 2 / float_sums<Stored>;
    constexpr int side_by_side = R < most ? R : most;
    const auto with = [&](auto dots, int n) {
        for (int r = 0; r < R; r += n) dots(w + r * w_stride, w_stride, x, k, access, out + r);
    };
    access.several ? with(float_dots<Stored, side_by_side>, side_by_side) : with(float_dots<Stored, 1>, 1);
}

using FloatTile = void (*)(const uint8_t* w, size_t w_stride, const uint8_t* x, size_t x_stride, int64_t k,
                           float* out, size_t out_stride);

/// Rows [first, n_rows), R at a time, times tokens in tiles of nearly equal size; returns the first row that
/// is left. R = 1 serves the last few rows, token by token.
template <class Stored, int R>
static int64_t float_product_by_rows(const uint8_t* w, size_t w_stride, int64_t first, int64_t n_rows,
                                     const uint8_t* x, size_t x_stride, int64_t n_tokens, int64_t k,
                                     float* out, size_t out_stride, Access access) {
    const int64_t n_tiles = (n_tokens + float_tokens - 1) / float_tokens;
    int64_t r = first;
    for (; r + R <= n_rows; r += R) {
        const uint8_t* rows = w + r * w_stride;
        if (n_tokens == 1 || R == 1) {  // tiles have at least two tokens
            for (int64_t t = 0; t < n_tokens; ++t)
                float_dots_of_tile<Stored, R>(rows, w_stride, x + t * x_stride, k, access,
                                              out + t * out_stride + r);
            continue;
        }
        if constexpr (R > 1) {
            static constexpr FloatTile tiles[] = {float_tile<Stored, R, 2>, float_tile<Stored, R, 3>,
                                                  float_tile<Stored, R, 4>, float_tile<Stored, R, 5>,
                                                  float_tile<Stored, R, 6>};
            for (int64_t tile = 0; tile < n_tiles; ++tile) {
                const int64_t t = tile * n_tokens / n_tiles, end = (tile + 1) * n_tokens / n_tiles;
                tiles[end - t - 2](rows, w_stride, x + t * x_stride, x_stride, k, out + t * out_stride + r,
                                   out_stride);
            }
        }
    }
    return r;
}

}  // namespace slimrt::cpu::SLIMRT_ISA
