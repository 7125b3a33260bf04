// Up to eight tokens of x for linear_few.cu: a chunk of a token as two f16 (or bf16) parts that add up to it,
// in shared memory, normed before where a norm is fused.
#pragma once

#include "kernels/cuda/linear_weights.cuh"
#include "kernels/cuda/norm.cuh"

namespace slimrt::cuda {

constexpr int kTop = 9;  // exponent that the largest magnitude gets, so that sums of 32 fit f16

/// A token's chunk in shared memory, in bytes: high parts; the power of two to multiply them by; low parts;
/// sums of groups (of high parts, then of low parts). Of each group a part has 16 bytes for each of four
/// members. Offsets are such that reads of eight columns have no bank conflicts.
template <class W>
struct TokenSpace {
    static constexpr int kInverse = 2 * W::kChunk, kLow = kInverse + 64, kSums = kLow + 2 * W::kChunk;
    static constexpr int kBytes = kSums + (W::kMins && W::kScales > 8 ? 96 : 32);
};

/// A token's row: of x, or of what is normed while it is loaded.
struct TokenRow {
    const float* at;
    const NormView* norm;  // null: as it is
    RowScale by;

    template <int n>
    __device__ Pack<float, n> load(int i) const {
        const auto v = load_pack<n>(at + i);
        return norm ? normed<n>(*norm, by, v, i) : v;
    }
    __device__ bool in_packs() const { return reinterpret_cast<uintptr_t>(at) % kPiece == 0; }
};

/// Sums both numbers over each `lanes` lanes; the sum of a is in their lower half, that of b in the upper.
template <int lanes>
__device__ float sum_of_lanes(float a, float b, int lane) {
    const bool upper = lane & lanes / 2;
    float sum = (upper ? b : a) + __shfl_xor_sync(0xffffffff, upper ? a : b, lanes / 2);
#pragma unroll
    for (int bits = lanes / 4; bits; bits /= 2) sum += __shfl_xor_sync(0xffffffff, sum, bits);
    return sum;
}

/// Four numbers as two words, in the order of codes.
template <class W>
__device__ uint2 pack(const float (&v)[4]) {
    if constexpr (W::kBf16)
        return {pair_bf16(v[0], v[1]), pair_bf16(v[2], v[3])};
    else if constexpr (W::kScales == 0)
        return {pair_f16(v[0], v[1]), pair_f16(v[2], v[3])};
    else
        return {pair_f16(v[0], v[2]), pair_f16(v[1], v[3])};
}
template <class W>
__device__ float unpack(uint2 words, int i) {
    if constexpr (W::kScales == 0) {
        const uint16_t bits = uint16_t((i / 2 ? words.y : words.x) >> i % 2 * 16);
        return W::kBf16 ? from_bf16(bits) : from_f16(bits);
    } else {
        return from_f16(uint16_t((i % 2 ? words.y : words.x) >> i / 2 * 16));
    }
}

/// A lane's elements of a token's chunk: four of each 128, zeros beyond k.
template <class W>
struct TokenChunk {
    static constexpr int kEach = W::kChunk / (4 * kWarp);
    Pack<float, 4> v[kEach];

    /// Elements [first, first + k) of the row.
    __device__ void load(const TokenRow& row, int first, int k, int lane) {
        const int at = 4 * lane;
        if (k == W::kChunk && row.in_packs()) {
#pragma unroll
            for (int i = 0; i < kEach; ++i) v[i] = row.load<4>(first + at + i * 4 * kWarp);
            return;
        }
#pragma unroll
        for (int i = 0; i < 4 * kEach; ++i) {
            const int index = at + i / 4 * 4 * kWarp + i % 4;
            v[i / 4].at[i % 4] = index < k ? row.load<1>(first + index).at[0] : 0.0f;
        }
    }
    /// Writes both parts and, for minima, the sums of their groups.
    __device__ void split(unsigned char* to, int lane);
};

template <class W>
__device__ void TokenChunk<W>::split(unsigned char* to, int lane) {
    using T = TokenSpace<W>;
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < 4 * kEach; ++i)
        largest = max(largest, __float_as_uint(v[i / 4].at[i % 4]) & 0x7fffffff);
    largest = largest_in_warp(largest);
    const bool finite = largest < 0x7f800000;  // else no low parts: infinity - infinity is NaN
    const int shift = min(kTop - exponent_of(largest), 126);
    const float factor = power_of_2(shift);
    // Element 4 lane + 128 i is of group lane / 8 + 4 i, half lane / 4 % 2, member lane % 4.
    unsigned char* const words = to + lane / 8 * 2 * kGroup + lane % 4 * 16 + lane / 4 % 2 * 8;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        for (float& x : v[i].at) x *= factor;
        const uint2 high = pack<W>(v[i].at);
        float low[4];
        for (int j = 0; j < 4; ++j) low[j] = finite ? v[i].at[j] - unpack<W>(high, j) : 0.0f;
        *reinterpret_cast<uint2*>(words + i * 8 * kWarp) = high;
        *reinterpret_cast<uint2*>(words + T::kLow + i * 8 * kWarp) = pack<W>(low);
    }
    if constexpr (W::kMins) {
        const auto four = [&](int i) { return (v[i].at[0] + v[i].at[1]) + (v[i].at[2] + v[i].at[3]); };
        constexpr int kLanes = W::kChunk / W::kScales / 4, kHalf = kLanes / 2;  // of a group
        const float sum = sum_of_lanes<kLanes>(four(0), four(1), lane);
        uint16_t* const out =
            reinterpret_cast<uint16_t*>(to + T::kSums) + lane / kHalf % 2 * W::kScales / 2 + lane / kLanes;
        const uint16_t high = to_f16(sum);
        if (lane % kHalf == 0) {
            out[0] = high;
            out[W::kScales] = to_f16(finite ? sum - from_f16(high) : 0.0f);
        }
    }
    if (lane == 0) *reinterpret_cast<float*>(to + T::kInverse) = power_of_2(-shift);
}

}  // namespace slimrt::cuda
