// simd.h for baseline NEON (ARMv8.0).
#pragma once

#include <arm_neon.h>

namespace slimrt::cpu::SLIMRT_ISA {

/// Adds 16 products, each to any of the sums; two products are below 2^15.
static inline int32x4_t add_dot(int32x4_t sums, int8x16_t a, int8x16_t b) {
    return vpadalq_s16(sums, vmlal_high_s8(vmull_s8(vget_low_s8(a), vget_low_s8(b)), a, b));
}
/// Adds products 4 i to 4 i + 3 to sum i.
static inline int32x4_t add_quad_dots(int32x4_t sums, int8x16_t a, int8x16_t b) {
    return vpadalq_s16(sums, vpaddq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)), vmull_high_s8(a, b)));
}

}  // namespace slimrt::cpu::SLIMRT_ISA

#include "kernels/cpu/simd_arm.h"
