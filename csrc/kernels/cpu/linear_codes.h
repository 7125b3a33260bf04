// The kernels of quantised weights as entries of the table, and loops of the dot product alone, which measure
// the peak rate of arithmetic (Isa::busy).
#pragma once

#include "core/dtype.h"
#include "kernels/cpu/linear_few.h"
#include "kernels/cpu/linear_panel.h"

namespace slimrt::cpu::SLIMRT_ISA {

static_assert(kPanelRows % (panel_vectors * lanes) == 0);

/// Rows [first, ...) in whole panels of V * lanes rows; returns the first row that is left.
template <class Weight, int V, class Ops>
static int64_t product_by_panels(const uint8_t* w, size_t w_stride, int64_t first, int64_t n_rows,
                                 const uint8_t* x, size_t x_stride, int64_t n_tokens, int64_t k, float* out,
                                 size_t out_stride) {
    int64_t r = first;
    for (; r + V * lanes <= n_rows; r += V * lanes) {
        panel_product<Weight, V, Ops>(w, w_stride, r, x, x_stride, n_tokens, k, out + r, out_stride);
    }
    return r;
}

/// Rows [r, n_rows), several side by side where access.several, else one by one.
template <class Weight>
static void product_of_rows(const uint8_t* w, size_t w_stride, int64_t r, int64_t n_rows, const uint8_t* x,
                            size_t x_stride, int64_t n_tokens, int64_t k, float* out, size_t out_stride,
                            Access access) {
    if (access.several)
        r = product_by_rows<Weight, dot_rows>(w, w_stride, r, n_rows, x, x_stride, n_tokens, k, out,
                                              out_stride, access);
    product_by_rows<Weight, 1>(w, w_stride, r, n_rows, x, x_stride, n_tokens, k, out, out_stride, access);
}

/// All rows: whole panels if there are many tokens, then lanes rows at a time, then single rows. There are
/// multiples of 16 interleaved rows, so none of them is left for the last.
template <class Weight, class Ops>
static void quant_product(const void* weights, size_t w_stride, int64_t n_rows, const void* activations,
                          size_t x_stride, int64_t n_tokens, int64_t k, float* out, size_t out_stride,
                          Access access) {
    const uint8_t* w = static_cast<const uint8_t*>(weights);
    const uint8_t* x = static_cast<const uint8_t*>(activations);
    if (n_tokens > 1) access = few_tokens_access;
    int64_t r = 0;
    if (n_tokens > max_few<Weight>)
        r = product_by_panels<Weight, panel_vectors, Ops>(w, w_stride, r, n_rows, x, x_stride, n_tokens, k,
                                                          out, out_stride);
    // Few tokens: all rows; many: those left over by the panels.
    if constexpr (max_few<Weight> >= min_few<Weight>) {
        if (n_tokens >= min_few<Weight>)
            r += product_of_few<Weight>(w + r * w_stride, w_stride, n_rows - r, x, x_stride, n_tokens, k,
                                        out + r, out_stride, access);
    }
    if constexpr (!is_interleaved<Weight>)
        product_of_rows<Weight>(w, w_stride, r, n_rows, x, x_stride, n_tokens, k, out, out_stride, access);
}

template <class Weight, class Ops = ByElement>
static constexpr LinearKernel with_codes(DType type) {
    return {static_cast<uint32_t>(type), 0, PackedFor<Weight>::bytes, pack<PackedFor<Weight>>,
            quant_product<Weight, Ops>};
}

/// Operands that the compiler cannot assume to be constant or equal.
alignas(64) static uint8_t operands[12][64];

/// `rounds` times 12 dot products of registers, with enough independent sums to hide their latency. few: how
/// many sums leave registers for the operands where there are 16.
template <class Sum, int few = 6, class Load, class Dot>
static void keep_busy(int64_t rounds, const Load& read, const Dot& dot_of, float* out) {
    constexpr int independent = registers == 32 ? 12 : few;
    Sum sums[independent];
    asm volatile("" : : "r"(operands) : "memory");
#pragma GCC unroll 12
    for (int j = 0; j < independent; ++j) memcpy(&sums[j], operands[j], sizeof(Sum));
    for (int64_t i = 0; i < rounds * 12 / independent; ++i) {
        asm volatile("" : : "r"(operands) : "memory");
        const auto w = read(), x = read();
#pragma GCC unroll 12
        for (int j = 0; j < independent; ++j) sums[j] = dot_of(sums[j], w, x);
    }
#pragma GCC unroll 12
    for (int j = 0; j < independent; ++j) memcpy(operands[j], &sums[j], sizeof(Sum));
    memcpy(out, operands, sizeof(Sum));
}

[[maybe_unused]] static int64_t busy_floats(int64_t rounds, float* out) {
    const auto read = [] { return load(reinterpret_cast<const float*>(operands)); };
    keep_busy<Vec, 12>(rounds, read, [](Vec s, Vec w, Vec x) { return fma(w, x, s); }, out);
    return rounds * 12 * lanes;
}

}  // namespace slimrt::cpu::SLIMRT_ISA
