// Element types of weights, activations and cache rows as numbers (core/dtype.h), and how several are moved.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace slimrt::cuda {

constexpr int kWarp = 32;

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

/// OCP fp8 as the bits of an f16. An e4m3 becomes 2^-8 times its value, subnormals too, for which the scale
/// of a stored row makes up. Its NaN codes become finite: stored rows have NaN in the scale.
__device__ inline uint16_t e4m3_to_f16(uint8_t code) {
    return static_cast<uint16_t>((code & 0x80) << 8 | (code & 0x7f) << 7);
}
__device__ inline uint16_t e5m2_to_f16(uint8_t code) { return static_cast<uint16_t>(code << 8); }

/// n elements that one instruction moves, aligned to their size together.
template <class T, int n>
struct alignas(n * sizeof(T)) Pack {
    T at[n];
};
template <int n, class T>
__device__ inline Pack<T, n> load_pack(const T* p) {
    return *reinterpret_cast<const Pack<T, n>*>(p);
}
template <int n, class T>
__device__ inline void store_pack(T* p, const Pack<T, n>& pack) {
    *reinterpret_cast<Pack<T, n>*>(p) = pack;
}

}  // namespace slimrt::cuda
