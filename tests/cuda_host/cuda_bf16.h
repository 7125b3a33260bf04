// bfloat16 as the host computes it: conversions only, to the nearest, ties to even.
#pragma once

#include <bit>
#include <cstdint>

#include "cuda_runtime.h"

struct alignas(2) __nv_bfloat16 {
    uint16_t bits;
};

inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return {bits}; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 h) { return h.bits; }
inline float __bfloat162float(__nv_bfloat16 h) { return std::bit_cast<float>(uint32_t{h.bits} << 16); }

inline __nv_bfloat16 __float2bfloat16_rn(float x) {
    const uint32_t u = std::bit_cast<uint32_t>(x);
    if ((u & 0x7fffffff) > 0x7f800000) return {0x7fff};  // as the device has it
    return {uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16)};
}
inline __nv_bfloat16 __float2bfloat16(float x) { return __float2bfloat16_rn(x); }
