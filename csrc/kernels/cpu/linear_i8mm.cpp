// The kernels of the instruction set `neon_i8mm`: products with quantised weights by ByMatrix. The rest is
// that of neon_dot.
#include "kernels/cpu/dot_neon_i8mm.h"
#include "kernels/cpu/linear.h"
#include "kernels/cpu/linear_codes.h"

namespace slimrt::cpu::SLIMRT_ISA {

const LinearKernel linear_kernels[] = {
    with_codes<WeightQ8_0, ByMatrix>(DType::Q8_0),
    with_codes<WeightQ4_0, ByMatrix>(DType::Q4_0),
    with_codes<WeightQ4_K, ByMatrix>(DType::Q4_K),
    with_codes<WeightQ5_K, ByMatrix>(DType::Q5_K),
    with_codes<WeightQ6_K, ByMatrix>(DType::Q6_K),
    with_codes<WeightIQ4_NL, ByMatrix>(DType::IQ4_NL),
    with_codes<WeightIQ4_XS, ByMatrix>(DType::IQ4_XS),
    with_codes<WeightMXFP4, ByMatrix>(DType::MXFP4),
    with_codes<WeightTQ2_0, ByMatrix>(DType::TQ2_0),
    with_codes<WeightOfCodes<ValuesIQ2>, ByMatrix>(DType::IQ2_N),
    with_codes<WeightOfCodes<ValuesIQ3_XXS>, ByMatrix>(DType::IQ3_XXS_N),
    with_codes<WeightOfCodes<ValuesIQ3_S>, ByMatrix>(DType::IQ3_S_N),
    {0, 0, nullptr, nullptr, nullptr},
};

int64_t busy(uint32_t type, int64_t rounds, float* out) {
    const bool is_float =
        type == static_cast<uint32_t>(DType::F32) || type == static_cast<uint32_t>(DType::F16);
    if (is_float) return busy_floats(rounds, out);
    const auto read = [] { return load_panel(operands); };
    const auto dot_of = [](PanelSums s, PanelCodes w, PanelCodes x) { return vmmlaq_s32(s, w, x); };
    keep_busy<PanelSums>(rounds, read, dot_of, out);
    return rounds * 12 * lanes * 8;
}

}  // namespace slimrt::cpu::SLIMRT_ISA
