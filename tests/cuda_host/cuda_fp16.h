// Half precision as the host computes it: conversions only, to the nearest, ties to even.
#pragma once

#include <bit>
#include <cstdint>

#include "cuda_runtime.h"

struct alignas(2) __half {
    uint16_t bits;
};

inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
inline unsigned short __half_as_ushort(__half h) { return h.bits; }

/// The exponent moves from bias 15 to 127 by a product, which makes subnormals right too.
inline float __half2float(__half h) {
    const uint32_t magnitude = h.bits & 0x7fff, sign = uint32_t{h.bits & 0x8000u} << 16;
    const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
    const uint32_t special = magnitude >= 0x7c00 ? 0x7f800000 : 0;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(scaled) | special | sign);
}

inline __half __float2half_rn(float x) {
    constexpr uint32_t kInfinity = 0x7f800000, kFromHere = 0x477ff000;  // 65520 is infinite
    const uint32_t u = std::bit_cast<uint32_t>(x), magnitude = u & 0x7fffffff;
    const uint16_t sign = u >> 16 & 0x8000;
    if (magnitude > kInfinity) return {0x7fff};  // as the device has it
    if (magnitude >= kFromHere) return {uint16_t(sign | 0x7c00)};
    if (magnitude < 0x38800000) {  // subnormal: a sum whose last bit is 2^-24
        const float sum = std::bit_cast<float>(magnitude) + 0.5f;
        return {uint16_t(sign | (std::bit_cast<uint32_t>(sum) - 0x3f000000))};
    }
    const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    return {uint16_t(sign | ((rounded >> 13) - (112 << 10)))};
}
inline __half __float2half(float x) { return __float2half_rn(x); }
