#include "kernels/cpu/linear.h"

#include "core/dtype.h"
#include "kernels/cpu/linear_float_panel.h"
#include "kernels/cpu/linear_panel.h"
#include "kernels/cpu/linear_quant.h"
#include "kernels/cpu/linear_wide.h"

namespace slimrt::cpu::SLIMRT_ISA {

/// As many rows as fill panels of V * lanes; returns the row it ended at.
template <class Weight, int V>
static int64_t product_by_panels(const uint8_t* w, size_t w_stride, int64_t first, int64_t n_rows,
                                 const uint8_t* x, size_t x_stride, int64_t n_tokens, int64_t k, float* out,
                                 size_t out_stride) {
    int64_t r = first;
    for (; r + V * lanes <= n_rows; r += V * lanes) {
        panel_product<Weight, V>(w + r * w_stride, w_stride, x, x_stride, n_tokens, k, out + r, out_stride);
    }
    return r;
}

template <class Weight>
static void quant_product(const void* weights, size_t w_stride, int64_t n_rows, const void* activations,
                          size_t x_stride, int64_t n_tokens, int64_t k, float* out, size_t out_stride) {
    const uint8_t* w = static_cast<const uint8_t*>(weights);
    const uint8_t* x = static_cast<const uint8_t*>(activations);
    int64_t r = 0;
    if (n_tokens >= panel_least) {
        r = product_by_panels<Weight, panel_vectors>(w, w_stride, r, n_rows, x, x_stride, n_tokens, k, out,
                                                     out_stride);
        r = product_by_panels<Weight, 1>(w, w_stride, r, n_rows, x, x_stride, n_tokens, k, out, out_stride);
    }
    if (n_tokens > 1)
        r = product_by_rows<Weight, dot_rows>(w, w_stride, r, n_rows, x, x_stride, n_tokens, k, out,
                                              out_stride);
    else
        r = product_by_rows<Weight, rows_of_one<Weight>>(w, w_stride, r, n_rows, x, x_stride, n_tokens, k,
                                                         out, out_stride);
    product_by_rows<Weight, 1>(w, w_stride, r, n_rows, x, x_stride, n_tokens, k, out, out_stride);
}

template <class Stored>
static constexpr LinearKernel with_floats(DType type) {
    return {static_cast<uint32_t>(type), 0, nullptr, nullptr, float_product<Stored>};
}

/// The same type for many tokens, where the ISA has it.
template <class Stored, class Ops = WidePairs>
static constexpr LinearKernel with_wide(DType type) {
    if constexpr (Ops::least_tokens > 0)
        return {static_cast<uint32_t>(type), Ops::least_tokens, wide_bytes, wide_pack,
                wide_product<Stored, Ops>};
    else
        return with_floats<Stored>(type);
}

template <class Weight>
static constexpr LinearKernel with_codes(DType type) {
    return {static_cast<uint32_t>(type), 0, packed_bytes<Weight>, pack<Weight>, quant_product<Weight>};
}

const LinearKernel linear_kernels[] = {
    with_wide<Half>(DType::F16),         with_wide<Brain>(DType::BF16),
    with_floats<float>(DType::F32),      with_floats<Half>(DType::F16),
    with_floats<Brain>(DType::BF16),     with_codes<WeightQ8_0>(DType::Q8_0),
    with_codes<WeightQ4_0>(DType::Q4_0), with_codes<WeightQ4_K>(DType::Q4_K),
    with_codes<WeightQ5_K>(DType::Q5_K), with_codes<WeightQ6_K>(DType::Q6_K),
    {0, 0, nullptr, nullptr, nullptr},
};

}  // namespace slimrt::cpu::SLIMRT_ISA
