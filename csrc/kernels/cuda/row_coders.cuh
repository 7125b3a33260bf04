// Coders of rows (core/dtype.h), bit for bit as kernels/cpu/stored.h and few_bits.h.
#pragma once

#include "kernels/cuda/packs.cuh"
#include "kernels/cuda/row_types.cuh"

namespace slimrt::cuda {

constexpr uint32_t kMagnitude = 0x7fffffff, kExponent = 0x7f800000;

__device__ inline uint32_t magnitude(float x) { return __float_as_uint(x) & kMagnitude; }
__device__ inline bool finite(float x) { return magnitude(x) < kExponent; }
__device__ inline float nan() { return __uint_as_float(0x7fc00000); }
__device__ inline uint8_t sign(float x) { return __float_as_uint(x) >> 24 & 0x80; }

// Coders of one element. Types with a scale choose it by the largest magnitude of the head.

template <class Row>
struct Coder;

template <>
struct Coder<RowF32> {
    NoScale scale;
    __device__ static float encode(float x) { return x; }
};

template <>
struct Coder<RowF16> {
    NoScale scale;
    __device__ static uint16_t encode(float x) {  // the device's own conversion loses NaN's sign and digits
        const uint32_t u = __float_as_uint(x), nan = 0x7e00 | (u >> 16 & 0x8000) | (u >> 13 & 0x3ff);
        return magnitude(x) > kExponent ? static_cast<uint16_t>(nan) : to_f16(x);
    }
};

template <>
struct Coder<RowBF16> {
    NoScale scale;
    __device__ static uint16_t encode(float x) {
        return magnitude(x) > kExponent ? static_cast<uint16_t>(__float_as_uint(x) >> 16 | 0x40) : to_bf16(x);
    }
};

template <>
struct Coder<RowQ8> {
    float scale;
    bool zeros;  // all codes are 0
    __device__ explicit Coder(float high)
        : scale(finite(high) ? high / 127 : nan()), zeros(!finite(high) || scale == 0) {}
    __device__ int8_t encode(float x) const {
        const float code = zeros ? 0.0f : x / scale;
        return static_cast<int8_t>(__float2int_rn(code > 127 ? 127.0f : code < -127 ? -127.0f : code));
    }
};

/// Rounds a finite magnitude to a float of so many bits of mantissa whose smallest normal number is
/// 2^smallest: to nearest, ties to even. Exponents may exceed those that the type has bits for.
template <int mantissa, int smallest>
__device__ uint32_t to_fp8(uint32_t magnitude) {
    constexpr int drop = 23 - mantissa;
    if (magnitude < static_cast<uint32_t>(127 + smallest) << 23) {
        const float steps = __uint_as_float(static_cast<uint32_t>(127 + mantissa - smallest) << 23);
        return static_cast<uint32_t>(__float2int_rn(__uint_as_float(magnitude) * steps));
    }
    const uint32_t rounded = (magnitude + (1u << (drop - 1)) - 1 + (magnitude >> drop & 1)) >> drop;
    return rounded - (static_cast<uint32_t>(126 + smallest) << mantissa);
}

template <>
struct Coder<RowE4M3> {
    float scale, shrink;  // brings magnitudes below 2^8
    bool zeros;
    __device__ explicit Coder(float high) : scale(nan()), shrink(0), zeros(!finite(high)) {
        if (zeros) return;
        constexpr int kLowest = -100;  // of smaller rows the power would not be a float
        const int exponent = static_cast<int>(__float_as_uint(high) >> 23) - 127;
        const int power = exponent < kLowest ? kLowest : exponent;
        scale = __uint_as_float(static_cast<uint32_t>(power + 1 + 127) << 23);  // infinite for power 127
        shrink = __uint_as_float(static_cast<uint32_t>(7 - power + 127) << 23);
    }
    __device__ uint8_t encode(float x) const {
        const float small = x * shrink;
        return zeros ? 0 : static_cast<uint8_t>(to_fp8<3, -6>(magnitude(small)) | sign(small));
    }
};

template <>
struct Coder<RowE5M2> {
    NoScale scale;
    __device__ static uint8_t encode(float x) {
        constexpr uint32_t kInfinity = 0x7c, kNan = 0x7e, kMax = 0x48000000;
        const uint32_t m = magnitude(x), rounded = to_fp8<2, -14>(m > kMax ? kMax : m);
        return static_cast<uint8_t>((m > kExponent         ? kNan
                                     : rounded > kInfinity ? kInfinity
                                                           : rounded) |
                                    sign(x));
    }
};

// Few bits: a warp codes the elements that share a scale and a minimum.

/// The largest f16 not above x, and the smallest not below.
__device__ inline uint16_t half_below(float x) {
    const uint16_t h = to_f16(x);
    if (!(from_f16(h) > x)) return h;
    return static_cast<uint16_t>(h == 0 ? 0x8001 : h & 0x8000 ? h + 1 : h - 1);
}
__device__ inline uint16_t half_above(float x) { return half_below(-x) ^ 0x8000; }

/// The first of a warp's numbers that equals the best one by `better`: of zeros the sign counts.
template <class Better>
__device__ float first_best(float x, Better better) {
    float best = x;
    for (int bits = kWarp / 2; bits > 0; bits /= 2) {
        const float other = __shfl_xor_sync(kAll, best, bits);
        best = better(other, best) ? other : best;
    }
    return __shfl_sync(kAll, x, __ffs(static_cast<int>(__ballot_sync(kAll, x == best))) - 1);
}

struct CodedGroup {
    int code;  // of this lane's element
    Affine how;
};

/// Codes a group, an element in each lane; lanes without one take the first.
template <class Row>
__device__ CodedGroup code_group(float x) {
    if (__any_sync(kAll, !finite(x))) return {0, {0x7e00, 0x7e00}};
    const float low = first_best(x, [](float a, float b) { return a < b; });
    const float high = first_best(x, [](float a, float b) { return a > b; });
    // Rounded outwards, so that every element lies between minimum and minimum + kMaxCode scales.
    CodedGroup group;
    group.how.minimum = half_below(low);
    const float min = from_f16(group.how.minimum);
    group.how.scale = half_above((high - min) / Row::kMaxCode);
    const float scale = from_f16(group.how.scale), code = scale > 0 ? (x - min) / scale : 0.0f;
    group.code = __float2int_rn(code < Row::kMaxCode ? code : static_cast<float>(Row::kMaxCode));
    return group;
}

}  // namespace slimrt::cuda
