#include "kernels/cpu/linear.h"

#include "core/dtype.h"
#include "kernels/cpu/linear_codes.h"
#include "kernels/cpu/linear_float_panel.h"
#include "kernels/cpu/linear_int16.h"

namespace slimrt::cpu::SLIMRT_ISA {

template <class Stored>
static constexpr LinearKernel with_floats(DType type) {
    return {static_cast<uint32_t>(type), 0, nullptr, nullptr, float_product<Stored>};
}

/// The kernel for many tokens, where the ISA has one, else the same as with_floats().
template <class Stored, class Ops = Int16Products>
static constexpr LinearKernel with_int16(DType type) {
    if constexpr (Ops::min_tokens > 0)
        return {static_cast<uint32_t>(type), Ops::min_tokens, int16_packed_bytes, int16_pack,
                int16_product<Stored, Ops>};
    else
        return with_floats<Stored>(type);
}

/// Types that also have a kernel for rows that are not interleaved. Where interleaving does not pay, the
/// entry ends the table: these come last.
template <class Weight>
static constexpr LinearKernel with_interleaved(DType type) {
    if constexpr (interleaving_pays)
        return with_codes<Interleaved<Weight>>(type);
    else
        return {0, 0, nullptr, nullptr, nullptr};
}

const LinearKernel linear_kernels[] = {
    with_int16<Half>(DType::F16),
    with_int16<BFloat16>(DType::BF16),
    with_floats<float>(DType::F32),
    with_floats<Half>(DType::F16),
    with_floats<BFloat16>(DType::BF16),
    with_codes<WeightQ8_0>(DType::Q8_0),
    with_codes<WeightQ4_0>(DType::Q4_0),
    with_codes<WeightQ4_K>(DType::Q4_K),
    with_codes<WeightQ5_K>(DType::Q5_K),
    with_codes<WeightQ6_K>(DType::Q6_K),
    with_codes<WeightIQ4_NL>(DType::IQ4_NL),
    with_codes<WeightIQ4_XS>(DType::IQ4_XS),
    with_codes<WeightMXFP4>(DType::MXFP4),
    with_codes<WeightTQ2_0>(DType::TQ2_0),
    with_codes<WeightOfCodes<ValuesIQ2>>(DType::IQ2_N),
    with_codes<WeightOfCodes<ValuesIQ3_XXS>>(DType::IQ3_XXS_N),
    with_codes<WeightOfCodes<ValuesIQ3_S>>(DType::IQ3_S_N),
    with_codes<Interleaved<WeightQ4_1>>(DType::Q4_1_R16),
    with_codes<Interleaved<WeightQ5_0>>(DType::Q5_0_R16),
    with_codes<Interleaved<WeightQ5_1>>(DType::Q5_1_R16),
    with_codes<Interleaved<WeightQ2_K>>(DType::Q2_K_R16),
    with_codes<Interleaved<WeightQ3_K>>(DType::Q3_K_R16),
    with_interleaved<WeightQ4_0>(DType::Q4_0_R16),
    with_interleaved<WeightQ4_K>(DType::Q4_K_R16),
    with_interleaved<WeightQ5_K>(DType::Q5_K_R16),
    with_interleaved<WeightIQ4_NL>(DType::IQ4_NL_R16),
    with_interleaved<WeightIQ4_XS>(DType::IQ4_XS_R16),
    with_interleaved<WeightMXFP4>(DType::MXFP4_R16),
    {0, 0, nullptr, nullptr, nullptr},
};

static int64_t busy_codes(int64_t rounds, float* out) {
    const auto read = [] { return load_panel(operands); };
    const auto dot_of = [](PanelSums s, const PanelCodes& w, const PanelCodes& x) {
        return dot<false>(s, w, x);
    };
    keep_busy<PanelSums>(rounds, read, dot_of, out);
    return rounds * 12 * lanes * 4;
}

template <class Ops>
static int64_t busy_int16(int64_t rounds, float* out) {
    if constexpr (Ops::min_tokens > 0) {
        const auto read = [] { return Ops::load_pairs(operands); };
        keep_busy<typename Ops::Sums>(rounds, read, Ops::dot, out);
        return rounds * 12 * lanes * 2;
    } else {
        return busy_floats(rounds, out);
    }
}

int64_t busy(uint32_t type, int64_t rounds, float* out) {
    if (type == static_cast<uint32_t>(DType::F32)) return busy_floats(rounds, out);
    if (type == static_cast<uint32_t>(DType::F16)) return busy_int16<Int16Products>(rounds, out);
    return busy_codes(rounds, out);
}

}  // namespace slimrt::cpu::SLIMRT_ISA
