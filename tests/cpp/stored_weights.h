// Random weights of every type, and their elements by the definition of the type (GGUF,
// kernels/cpu/blocks_grid.h).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "core/dtype.h"

namespace slimrt::cuda {

inline std::mt19937 rng(7);

inline float normal() {
    static std::normal_distribution<float> distribution;
    return distribution(rng);
}

inline uint16_t u16_at(const unsigned char* p) { return uint16_t(p[0] | p[1] << 8); }

inline double f16_at(const unsigned char* p) { return __half2float(__ushort_as_half(u16_at(p))); }
inline int nibble(const unsigned char* bytes, int i) { return bytes[i % 16] >> (i < 16 ? 0 : 4) & 15; }
inline int two_bits(const unsigned char* codes, int i) {
    return codes[i / 128 * 32 + i % 32] >> i / 32 % 4 * 2 & 3;
}
inline int bit(const unsigned char* bytes, int i) { return bytes[i / 8] >> i % 8 & 1; }

/// Numbers that codes of four bits stand for.
inline int looked_up(DType dtype, int code) {
    static constexpr int kIq4[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    static constexpr int kFp4[] = {0, 1, 2, 3, 4, 6, 8, 12}, kIq2[] = {8, 25, 43, 43, 43, 43, 43, 43};
    static constexpr int kXxs[] = {4, 12, 20, 28, 36, 44, 52, 62}, kS[] = {1, 3, 5, 7, 9, 11, 13, 15};
    if (dtype == DType::IQ4_NL || dtype == DType::IQ4_XS) return kIq4[code];
    const int* const magnitudes = dtype == DType::MXFP4       ? kFp4
                                  : dtype == DType::IQ2_N     ? kIq2
                                  : dtype == DType::IQ3_XXS_N ? kXxs
                                                              : kS;
    return magnitudes[code % 8] * (code < 8 ? 1 : -1);
}

/// Element i of a block of 32.
inline double element_of_32(DType dtype, const unsigned char* block, int i) {
    switch (dtype) {
        case DType::Q4_0:
            return f16_at(block) * (nibble(block + 2, i) - 8);
        case DType::Q4_1:
            return f16_at(block) * nibble(block + 4, i) + f16_at(block + 2);
        case DType::Q5_0:
            return f16_at(block) * (nibble(block + 6, i) + 16 * bit(block + 2, i) - 16);
        case DType::Q5_1:
            return f16_at(block) * (nibble(block + 8, i) + 16 * bit(block + 4, i)) + f16_at(block + 2);
        case DType::Q8_0:
            return f16_at(block) * int8_t(block[2 + i]);
        case DType::IQ4_NL:
            return f16_at(block) * looked_up(dtype, nibble(block + 2, i));
        default:
            return std::ldexp(looked_up(dtype, nibble(block + 1, i)), block[0] - 128);
    }
}

/// Element i of a block of 256.
inline double element_of_256(DType dtype, const unsigned char* block, int i) {
    const int g = i / 32;
    switch (dtype) {
        case DType::Q2_K:
            return f16_at(block + 80) * (block[i / 16] & 15) * two_bits(block + 16, i) -
                   f16_at(block + 82) * (block[i / 16] >> 4);
        case DType::Q3_K: {
            const unsigned char* const scales = block + 96;
            const int scale =
                (scales[i / 16 % 8] >> i / 128 * 4 & 15) | (scales[8 + i / 16 % 4] >> i / 64 * 2 & 3) << 4;
            const int third = block[i % 32] >> g & 1;
            return f16_at(block + 108) * (scale - 32) * (two_bits(block + 32, i) + 4 * third - 4);
        }
        case DType::Q4_K:
        case DType::Q5_K: {
            const unsigned char* const packed = block + 4;
            const bool five = dtype == DType::Q5_K;
            const int scale = g < 4 ? packed[g] & 63 : (packed[g + 4] & 15) | packed[g - 4] >> 6 << 4;
            const int minimum = g < 4 ? packed[g + 4] & 63 : packed[g + 4] >> 4 | packed[g] >> 6 << 4;
            const int code = block[(five ? 48 : 16) + g / 2 * 32 + i % 32] >> g % 2 * 4 & 15;
            const int fifth = five ? block[16 + i % 32] >> g & 1 : 0;
            return f16_at(block) * scale * (code + 16 * fifth) - f16_at(block + 2) * minimum;
        }
        case DType::Q6_K: {
            const int half = i / 128, part = g % 4;
            const int low = block[half * 64 + part % 2 * 32 + i % 32] >> part / 2 * 4 & 15;
            const int high = block[128 + half * 32 + i % 32] >> part * 2 & 3;
            return f16_at(block + 208) * int8_t(block[192 + i / 16]) * (low + 16 * high - 32);
        }
        case DType::TQ2_0:
            return f16_at(block + 64) * (two_bits(block, i) - 1);
        case DType::IQ4_XS: {
            const int scale = (block[4 + g / 2] >> g % 2 * 4 & 15) | (block[2 + g / 4] >> g % 4 * 2 & 3) << 4;
            return f16_at(block) * (scale - 32) * looked_up(dtype, nibble(block + 8 + 16 * g, i % 32));
        }
        default: {
            const double unit = dtype == DType::IQ2_N ? 0.125 : dtype == DType::IQ3_XXS_N ? 0.25 : 1;
            return f16_at(block) * unit * int8_t(block[2 + i / 16]) *
                   looked_up(dtype, nibble(block + 18 + 16 * g, i % 32));
        }
    }
}

/// Element i of a stored row, by the definition of its type (GGUF, kernels/cpu/blocks_grid.h).
inline double element(DType dtype, const unsigned char* row, int64_t i) {
    const DTypeInfo& type = dtype_info(dtype);
    const unsigned char* const block = row + i / type.block * type.block_bytes;
    if (type.block == 256) return element_of_256(dtype, block, int(i % 256));
    if (type.block == 32) return element_of_32(dtype, block, int(i % 32));
    if (dtype == DType::F16) return f16_at(block);
    if (dtype == DType::BF16) return __bfloat162float(__ushort_as_bfloat16(u16_at(block)));
    float x;
    std::memcpy(&x, block, sizeof x);
    return x;
}

/// Where a block has its f16 numbers.
inline std::vector<int> halves(DType dtype) {
    switch (dtype) {
        case DType::Q4_1:
        case DType::Q5_1:
        case DType::Q4_K:
        case DType::Q5_K:
            return {0, 2};
        case DType::Q2_K:
            return {80, 82};
        case DType::Q3_K:
            return {108};
        case DType::Q6_K:
            return {208};
        case DType::TQ2_0:
            return {64};
        default:
            return {0};
    }
}

/// Random bytes, with numbers and scales of about `size`.
inline void fill(DType dtype, unsigned char* row, int64_t k, float size) {
    const DTypeInfo& type = dtype_info(dtype);
    const auto put = [](unsigned char* p, uint16_t bits) { std::memcpy(p, &bits, sizeof bits); };
    for (int64_t b = 0; b < k / type.block; ++b) {
        unsigned char* const block = row + b * type.block_bytes;
        for (int i = 0; i < type.block_bytes; ++i) block[i] = uint8_t(rng());
        const float x = normal() * size;
        if (dtype == DType::F32)
            std::memcpy(block, &x, sizeof x);
        else if (dtype == DType::BF16)
            put(block, __bfloat16_as_ushort(__float2bfloat16_rn(x)));
        else if (dtype == DType::MXFP4)
            block[0] = uint8_t(128 + std::ilogb(size) - int(rng() % 8));
        else
            for (const int at : halves(dtype))
                put(block + at, __half_as_ushort(__float2half_rn(normal() * size)));
    }
}

}  // namespace slimrt::cuda
