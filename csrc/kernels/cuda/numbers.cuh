// Element types of weights, activations and cache rows as numbers (core/dtype.h).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace slimrt::cuda {

__device__ inline float from_f16(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
__device__ inline float from_bf16(uint16_t bits) {
    return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}
__device__ inline uint16_t to_f16(float x) { return __half_as_ushort(__float2half_rn(x)); }
__device__ inline uint16_t to_bf16(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }

/// Two numbers as one register, the first in the low half.
__device__ inline uint32_t pair_f16(float low, float high) {
    return to_f16(low) | uint32_t(to_f16(high)) << 16;
}
__device__ inline uint32_t pair_bf16(float low, float high) {
    return to_bf16(low) | uint32_t(to_bf16(high)) << 16;
}

/// OCP e4m3 as the bits of an f16 2^8 times smaller (subnormals too), e5m2 as those of the same f16. Both NaN
/// codes of e4m3 are finite here: stored rows never hold them.
__device__ inline uint16_t e4m3_to_f16_small(uint8_t code) { return (code & 0x80) << 8 | (code & 0x7f) << 7; }
__device__ inline uint16_t e5m2_to_f16(uint8_t code) { return static_cast<uint16_t>(code << 8); }
__device__ inline float from_e4m3(uint8_t code) { return 256 * from_f16(e4m3_to_f16_small(code)); }
__device__ inline float from_e5m2(uint8_t code) { return from_f16(e5m2_to_f16(code)); }

}  // namespace slimrt::cuda
