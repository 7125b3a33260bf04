// Types of stored rows (core/dtype.h), a trait each: what a code is, where it is, and its number by its
// scale. with_row_type() chooses a trait.
#pragma once

#include <type_traits>

#include "core/dtype.h"
#include "kernels/cuda/numbers.cuh"

namespace slimrt::cuda {

struct NoScale {};
struct Affine {
    uint16_t scale, minimum;  // f16
};

/// A code for each element, contiguous. kGroup: columns of a row that share a scale; 0: all of a head.
template <class C, class S = NoScale>
struct RowOf {
    using Code = C;
    using Scale = S;
    static constexpr bool kScaled = !std::is_same_v<Scale, NoScale>;
    static constexpr int kGroup = 0;
    __device__ static Code code(const unsigned char* data, int column, int) {
        return reinterpret_cast<const Code*>(data)[column];
    }
};

struct RowF32 : RowOf<float> {
    static constexpr DType kType = DType::F32;
    __device__ static float number(float code, NoScale) { return code; }
};
struct RowF16 : RowOf<uint16_t> {
    static constexpr DType kType = DType::F16;
    __device__ static float number(uint16_t code, NoScale) { return from_f16(code); }
};
struct RowBF16 : RowOf<uint16_t> {
    static constexpr DType kType = DType::BF16;
    __device__ static float number(uint16_t code, NoScale) { return from_bf16(code); }
};
struct RowQ8 : RowOf<int8_t, float> {
    static constexpr DType kType = DType::Q8;
    __device__ static float number(int8_t code, float scale) { return static_cast<float>(code) * scale; }
};
struct RowE4M3 : RowOf<uint8_t, float> {
    static constexpr DType kType = DType::FP8_E4M3;
    __device__ static float number(uint8_t code, float scale) { return from_f16(e4m3_to_f16(code)) * scale; }
};
struct RowE5M2 : RowOf<uint8_t> {
    static constexpr DType kType = DType::FP8_E5M2;
    __device__ static float number(uint8_t code, NoScale) { return from_f16(e5m2_to_f16(code)); }
};
/// Codes of few bits, in groups of columns that share a scale and a minimum (see kernels/cpu/few_bits.h).
/// Eight codes, a unit, take n_bits bytes.
template <int n_bits>
struct RowFew : RowOf<uint8_t, Affine> {
    static constexpr int kBits = n_bits, kMaxCode = (1 << kBits) - 1;
    static constexpr DType kType = kBits == 4 ? DType::Q4 : kBits == 3 ? DType::Q3 : DType::Q2;
    static constexpr int kGroup = 32, kUnit = 8;

    /// In 4 bits: how many columns of the group that begins at `first` share their bytes with the columns
    /// after them.
    __device__ static int half_group(int first, int head_dim) {
        return (min(kGroup, head_dim - first) + 1) / 2;
    }
    __device__ static uint8_t code(const unsigned char* data, int column, int head_dim) {
        if constexpr (kBits == 4) {
            const int first = column / kGroup * kGroup, half = half_group(first, head_dim),
                      at = column - first;
            const unsigned char byte = data[first / 2 + (at < half ? at : at - half)];
            return at < half ? byte & 15 : byte >> 4;
        } else {
            const int byte = column * kBits / 8, shift = column * kBits % 8;
            const int more = shift + kBits > 8 ? data[byte + 1] << 8 : 0;
            return static_cast<uint8_t>((data[byte] | more) >> shift & kMaxCode);
        }
    }
    __device__ static float number(uint8_t code, Affine of) {
        return fmaf(from_f16(of.scale), static_cast<float>(code), from_f16(of.minimum));
    }

    /// The column of code i of a unit, head_dim if there is none; and the code's shift in the unit's bits.
    __device__ static int column(int unit, int i, int head_dim) {
        if constexpr (kBits < 4) return min(unit * kUnit + i, head_dim);
        const int first = unit / 4 * kGroup, half = half_group(first, head_dim), at = unit % 4 * 4 + i % 4;
        return at < half ? min(first + at + i / 4 * half, head_dim) : head_dim;
    }
    __device__ static constexpr int shift(int i) { return kBits < 4 ? kBits * i : i % 4 * 8 + i / 4 * 4; }
};

/// fn(the trait of a type), in a kernel or on the host.
#pragma nv_exec_check_disable
template <class Fn>
__host__ __device__ inline auto with_row_type(DType dtype, const Fn& fn) {
    switch (dtype) {
        case DType::F32:
            return fn(RowF32());
        case DType::F16:
            return fn(RowF16());
        case DType::BF16:
            return fn(RowBF16());
        case DType::Q8:
            return fn(RowQ8());
        case DType::FP8_E4M3:
            return fn(RowE4M3());
        case DType::FP8_E5M2:
            return fn(RowE5M2());
        case DType::Q4:
            return fn(RowFew<4>());
        case DType::Q3:
            return fn(RowFew<3>());
        default:
            return fn(RowFew<2>());
    }
}

}  // namespace slimrt::cuda
