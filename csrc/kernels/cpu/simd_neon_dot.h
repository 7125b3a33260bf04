// simd.h for NEON with sdot (ARMv8.2 dotprod).
#pragma once

#include <arm_neon.h>

namespace slimrt::cpu::SLIMRT_ISA {

/// Adds products 4 i to 4 i + 3 to sum i.
static inline int32x4_t add_quad_dots(int32x4_t sums, int8x16_t a, int8x16_t b) {
    return vdotq_s32(sums, a, b);
}
/// Adds 16 products, each to any of the sums.
static inline int32x4_t add_dot(int32x4_t sums, int8x16_t a, int8x16_t b) {
    return add_quad_dots(sums, a, b);
}

}  // namespace slimrt::cpu::SLIMRT_ISA

#include "kernels/cpu/simd_arm.h"
