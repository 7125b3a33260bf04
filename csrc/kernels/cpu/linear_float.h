// Products with F32, F16 and BF16 weights: f32 activations as they are, f32 sums.
#pragma once

#include "kernels/cpu/dot.h"

namespace slimrt::cpu::SLIMRT_ISA {

/// R rows times T tokens, each sum in a register of its own.
template <class Stored, int R, int T>
static void float_tile(const uint8_t* w, size_t w_stride, const uint8_t* x, size_t x_stride, int64_t k,
                       float* out, size_t out_stride) {
    Vec acc[T][R];
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
            weights[r] = load(row(r) + i);
        }
        for (int t = 0; t < T; ++t) multiply(weights, t, load(token(t) + i));
    }
    if (i < k) {
        for (int r = 0; r < R; ++r) weights[r] = load_part(row(r) + i, k - i);
        for (int t = 0; t < T; ++t) multiply(weights, t, load_part(token(t) + i, k - i));
    }
    for (int t = 0; t < T; ++t) {
        for (int r = 0; r < R; ++r) out[t * out_stride + r] = sum(acc[t][r]);
    }
}

/// One row times one token: one stream, which the processor prefetches best, in several sums that hide
/// latency.
template <class Stored>
static float float_dot(const uint8_t* w, const uint8_t* x, int64_t k) {
    constexpr int sums = 4;
    const Stored* row = reinterpret_cast<const Stored*>(w);
    const float* token = reinterpret_cast<const float*>(x);
    Vec acc[sums];
    for (Vec& a : acc) a = splat(0);
    int64_t i = 0;
    for (; i + sums * lanes <= k; i += sums * lanes) {
        for (int s = 0; s < sums; ++s)
            acc[s] = fma(load(row + i + s * lanes), load(token + i + s * lanes), acc[s]);
    }
    for (; i + lanes <= k; i += lanes) acc[0] = fma(load(row + i), load(token + i), acc[0]);
    if (i < k) acc[1] = fma(load_part(row + i, k - i), load_part(token + i, k - i), acc[1]);
    return sum((acc[0] + acc[1]) + (acc[2] + acc[3]));
}

template <class Stored, int R>
static void float_rows(const uint8_t* w, size_t w_stride, const uint8_t* x, size_t x_stride, int64_t n_tokens,
                       int64_t k, float* out, size_t out_stride) {
    constexpr int tile = 6;
    int64_t t = 0;
    for (; t + tile <= n_tokens; t += tile) {
        float_tile<Stored, R, tile>(w, w_stride, x + t * x_stride, x_stride, k, out + t * out_stride,
                                    out_stride);
    }
    for (; t + 2 <= n_tokens; t += 2) {
        float_tile<Stored, R, 2>(w, w_stride, x + t * x_stride, x_stride, k, out + t * out_stride,
                                 out_stride);
    }
    for (int r = 0; t < n_tokens && r < R; ++r) {
        out[t * out_stride + r] = float_dot<Stored>(w + r * w_stride, x + t * x_stride, k);
    }
}

template <class Stored>
static void float_product(const void* w, size_t w_stride, int64_t n_rows, const void* x, size_t x_stride,
                          int64_t n_tokens, int64_t k, float* out, size_t out_stride) {
    constexpr int rows = registers == 32 ? 4 : 2;
    // Tokens in blocks whose activations stay in the second-level cache while all rows pass over them.
    const int64_t fitting = (384 << 10) / (4 * k + 1), block = fitting > 6 ? fitting / 6 * 6 : 6;
    for (int64_t t = 0; t < n_tokens; t += block) {
        const int64_t n = n_tokens - t < block ? n_tokens - t : block;
        const uint8_t* from = static_cast<const uint8_t*>(x) + t * x_stride;
        const uint8_t* row = static_cast<const uint8_t*>(w);
        float* to = out + t * out_stride;
        int64_t r = 0;
        for (; r + rows <= n_rows; r += rows) {
            float_rows<Stored, rows>(row + r * w_stride, w_stride, from, x_stride, n, k, to + r, out_stride);
        }
        for (; r < n_rows; ++r) {
            float_rows<Stored, 1>(row + r * w_stride, w_stride, from, x_stride, n, k, to + r, out_stride);
        }
    }
}

}  // namespace slimrt::cpu::SLIMRT_ISA
