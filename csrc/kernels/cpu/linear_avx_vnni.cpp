// The kernels of the instruction set `avx_vnni`: products of quantised weights with many tokens. The rest is
// that of avx2.
#include "core/dtype.h"
#include "kernels/cpu/linear.h"
#include "kernels/cpu/linear_codes.h"

namespace slimrt::cpu::SLIMRT_ISA {

/// Fewer tokens are limited by memory or unpacking, and left to avx2.
template <class Weight>
static constexpr LinearKernel with_panels(DType type) {
    const auto product = [](const void* w, size_t w_stride, int64_t n_rows, const void* x, size_t x_stride,
                            int64_t n_tokens, int64_t k, float* out, size_t out_stride, Access) {
        const auto* const rows = static_cast<const uint8_t*>(w);
        const auto* const tokens = static_cast<const uint8_t*>(x);
        const int64_t r = product_by_panels<Weight, panel_vectors, ByElement>(
            rows, w_stride, 0, n_rows, tokens, x_stride, n_tokens, k, out, out_stride);
        if constexpr (!is_interleaved<Weight>)  // interleaved rows fill whole panels
            product_by_rows<Weight, 1>(rows, w_stride, r, n_rows, tokens, x_stride, n_tokens, k, out,
                                       out_stride, few_tokens_access);
    };
    return {static_cast<uint32_t>(type), max_few<Weight> + 1, PackedFor<Weight>::bytes,
            pack<PackedFor<Weight>>, product};
}

const LinearKernel linear_kernels[] = {
    with_panels<WeightQ8_0>(DType::Q8_0),
    with_panels<Interleaved<WeightQ4_0>>(DType::Q4_0_R16),
    with_panels<Interleaved<WeightQ4_K>>(DType::Q4_K_R16),
    with_panels<Interleaved<WeightQ5_K>>(DType::Q5_K_R16),
    with_panels<WeightQ6_K>(DType::Q6_K),
    {0, 0, nullptr, nullptr, nullptr},
};

int64_t busy(uint32_t type, int64_t rounds, float* out) {
    const bool is_float =
        type == static_cast<uint32_t>(DType::F32) || type == static_cast<uint32_t>(DType::F16);
    if (is_float) return busy_floats(rounds, out);
    const auto read = [] { return load_panel(operands); };
    const auto dot_of = [](PanelSums s, PanelCodes w, PanelCodes x) { return dot<false>(s, w, x); };
    keep_busy<PanelSums>(rounds, read, dot_of, out);
    return rounds * 12 * lanes * 4;
}

}  // namespace slimrt::cpu::SLIMRT_ISA
