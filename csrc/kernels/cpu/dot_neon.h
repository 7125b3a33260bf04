// dot.h for baseline NEON (ARMv8.0): 16-bit products, two or four of which are added without overflow.
#pragma once

#include "kernels/cpu/dot_arm.h"

namespace slimrt::cpu::SLIMRT_ISA {

/// Sums of the halves of 64 products, two lanes each, or of their quarters. `start`: integers to be added at
/// the end.
struct HalfSums {
    int32x4_t v;
};
struct StartedHalves : HalfSums {
    const void* start;
};
struct QuarterSums {
    int32x4_t v;
    const void* start;
};

static inline HalfSums zero_sums() { return {vdupq_n_s32(0)}; }
static inline StartedHalves start_halves(const void* p) { return {zero_sums(), p}; }
static inline QuarterSums start_quarters(const void* p) { return {vdupq_n_s32(0), p}; }

/// Lane i: products i and i + 8. Activations are above -128, so that two products fit.
static inline int16x8_t products(uint8x16_t w, uint8x16_t x) {
    const int16x8_t low = vmull_s8(vget_low_s8(as_signed(w)), vget_low_s8(as_signed(x)));
    return vmlal_high_s8(low, as_signed(w), as_signed(x));
}
static inline int16x8_t add_products(int16x8_t sums, uint8x16_t w, uint8x16_t x) {
    const int16x8_t low = vmlal_s8(sums, vget_low_s8(as_signed(w)), vget_low_s8(as_signed(x)));
    return vmlal_high_s8(low, as_signed(w), as_signed(x));
}
template <bool is_wide, class AnyHalves>
static inline AnyHalves dot(AnyHalves sums, const Codes& w, const Codes& x) {
    int32x4_t half[2];
    for (int i = 0; i < 2; ++i) {
        const int16x8_t first = products(w.v[2 * i], x.v[2 * i]);
        half[i] = is_wide ? vpadalq_s16(vpaddlq_s16(first), products(w.v[2 * i + 1], x.v[2 * i + 1]))
                          : vpaddlq_s16(add_products(first, w.v[2 * i + 1], x.v[2 * i + 1]));
    }
    sums.v = vpaddq_s32(half[0], half[1]);
    return sums;
}
/// For groups of 16. Codes are below 64 in magnitude: four products are below 2^15.
template <bool is_wide>
static inline QuarterSums dot(QuarterSums sums, const Codes& w, const Codes& x) {
    int16x8_t quarter[4];
    for (int i = 0; i < 4; ++i) quarter[i] = products(w.v[i], x.v[i]);
    sums.v = vpaddq_s32(vpaddlq_s16(vpaddq_s16(quarter[0], quarter[1])),
                        vpaddlq_s16(vpaddq_s16(quarter[2], quarter[3])));
    return sums;
}
static inline Acc to_acc(HalfSums s, HalfSums next) { return {vcvtq_f32_s32(vpaddq_s32(s.v, next.v))}; }
static inline Acc to_acc(StartedHalves s, StartedHalves next) {
    return without_magic(vpaddq_s32(s.v, next.v) + load_as<int32x4_t>(s.start));
}
static inline Acc to_acc(QuarterSums s) { return without_magic(s.v + load_as<int32x4_t>(s.start)); }

constexpr int panel_vectors = 1;
constexpr bool few_in_registers = true;

template <bool is_wide>
static inline PanelSums dot(PanelSums acc, PanelCodes w, PanelCodes x) {
    return add_quad_dots(acc, w, x);
}

/// Codes: the element is broadcast first.
struct ByElement : AnyByElement {
    using AnyByElement::load;
    using Codes = int32x4_t;
    static Codes load(const uint8_t* p, size_t) { return load_as<int32x4_t>(p); }
    template <bool is_wide>
    static PanelSums dot(PanelSums acc, PanelCodes w, Codes x, int i) {
        const int32x4_t four = i == 0   ? vdupq_laneq_s32(x, 0)
                               : i == 1 ? vdupq_laneq_s32(x, 1)
                               : i == 2 ? vdupq_laneq_s32(x, 2)
                                        : vdupq_laneq_s32(x, 3);
        return SLIMRT_ISA::dot<is_wide>(acc, w, vreinterpretq_s8_s32(four));
    }
};

}  // namespace slimrt::cpu::SLIMRT_ISA
