// dot.h for NEON with sdot (ARMv8.2 dotprod).
#pragma once

#include "kernels/cpu/dot_arm.h"

namespace slimrt::cpu::SLIMRT_ISA {

/// Sums of the N parts of 64 products, four lanes each. `start`: integers to be added at the end.
template <int N>
struct PartSums {
    int32x4_t v[N];
};
template <int N>
struct StartedSums {
    int32x4_t v[N];
    const void* start;
};

static inline PartSums<2> zero_sums() {
    const int32x4_t first = {sum_bias, 0, 0, 0};
    return {first, first};
}
static inline StartedSums<2> start_halves(const void* p) { return {{}, p}; }
static inline StartedSums<4> start_quarters(const void* p) { return {{}, p}; }

template <bool is_wide, template <int> class AnySums, int N>
static inline AnySums<N> dot(AnySums<N> sums, const Codes& w, const Codes& x) {
    for (int i = 0; i < 4; ++i)
        sums.v[i * N / 4] = vdotq_s32(sums.v[i * N / 4], as_signed(w.v[i]), as_signed(x.v[i]));
    return sums;
}
static inline int32x4_t sums_of(int32x4_t a, int32x4_t b, int32x4_t c, int32x4_t d) {
    return vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d));
}
static inline Acc to_acc(const PartSums<2>& s, const PartSums<2>& next) {
    return without_magic(sums_of(s.v[0], s.v[1], next.v[0], next.v[1]));
}
static inline Acc to_acc(const StartedSums<2>& s, const StartedSums<2>& next) {
    return without_magic(sums_of(s.v[0], s.v[1], next.v[0], next.v[1]) + load_as<int32x4_t>(s.start));
}
static inline Acc to_acc(const StartedSums<4>& s) {
    return without_magic(sums_of(s.v[0], s.v[1], s.v[2], s.v[3]) + load_as<int32x4_t>(s.start));
}

constexpr int panel_vectors = 2;
constexpr bool few_in_registers = true;

template <bool is_wide>
static inline PanelSums dot(PanelSums acc, PanelCodes w, PanelCodes x) {
    return vdotq_s32(acc, w, x);
}

struct ByElement : AnyByElement {
    using AnyByElement::load;
    using Codes = int8x16_t;
    static Codes load(const uint8_t* p, size_t) { return load_panel(p); }
    template <bool is_wide>
    static PanelSums dot(PanelSums acc, PanelCodes w, Codes x, int i) {
        return i == 0   ? vdotq_laneq_s32(acc, w, x, 0)
               : i == 1 ? vdotq_laneq_s32(acc, w, x, 1)
               : i == 2 ? vdotq_laneq_s32(acc, w, x, 2)
                        : vdotq_laneq_s32(acc, w, x, 3);
    }
};

}  // namespace slimrt::cpu::SLIMRT_ISA
