// Dequantises stored weights to f32, and converts f32 to F16 and BF16. Every code times its scale is exact in
// f32, so an element is rounded at most once (where a minimum is added), whatever order the compiler
// multiplies in.
#include "core/dtype.h"
#include "kernels/cpu/blocks_grid.h"
#include "kernels/cpu/linear.h"

namespace slimrt::cpu::SLIMRT_ISA {

namespace {

void unpack_block(const BlockQ4_0& b, float* to) {
    const float d = b.d;
    for (int i = 0; i < 32; ++i) to[i] = d * float(nibble(b.codes, i) - 8);
}

void unpack_block(const BlockQ4_1& b, float* to) {
    const float d = b.d, m = b.m;
    for (int i = 0; i < 32; ++i) to[i] = d * float(nibble(b.codes, i)) + m;
}

void unpack_block(const BlockQ5_0& b, float* to) {
    const float d = b.d;
    const uint32_t high = u32_at(b.high);
    for (int i = 0; i < 32; ++i) to[i] = d * float((nibble(b.codes, i) | int(high >> i & 1) << 4) - 16);
}

void unpack_block(const BlockQ5_1& b, float* to) {
    const float d = b.d, m = b.m;
    const uint32_t high = u32_at(b.high);
    for (int i = 0; i < 32; ++i) to[i] = d * float(nibble(b.codes, i) | int(high >> i & 1) << 4) + m;
}

void unpack_block(const BlockQ8_0& b, float* to) {
    const float d = b.d;
    for (int i = 0; i < 32; ++i) to[i] = d * b.codes[i];
}

void unpack_block(const BlockQ2_K& b, float* to) {
    const float d = b.d, dmin = b.dmin;
    for (int j = 0; j < 8; ++j) {
        for (int i = 0; i < 32; ++i) {
            const int scale = b.scales[2 * j + i / 16], code = b.codes[j / 4 * 32 + i] >> j % 4 * 2 & 3;
            to[32 * j + i] = d * float(scale & 15) * float(code) - dmin * float(scale >> 4);
        }
    }
}

void unpack_block(const BlockQ3_K& b, float* to) {
    const float d = b.d;
    uint8_t scales[16];
    scales_q3(b.scales, scales);
    for (int j = 0; j < 8; ++j) {
        for (int i = 0; i < 32; ++i) {
            const int low = b.codes[j / 4 * 32 + i] >> j % 4 * 2 & 3, high = b.high[i] >> j & 1;
            to[32 * j + i] = d * float(scales[2 * j + i / 16] - 32) * float(low + 4 * high - 4);
        }
    }
}

void unpack_block(const BlockQ4_K& b, float* to) {
    float scale[16], *min = scale + 8;
    store(scale, eight_scales(&b));
    for (int j = 0; j < 8; ++j) {
        for (int i = 0; i < 32; ++i) {
            const int code = b.codes[j / 2 * 32 + i] >> j % 2 * 4 & 15;
            to[32 * j + i] = scale[j] * float(code) - min[j];
        }
    }
}

void unpack_block(const BlockQ5_K& b, float* to) {
    float scale[16], *min = scale + 8;
    store(scale, eight_scales(&b));
    for (int j = 0; j < 8; ++j) {
        for (int i = 0; i < 32; ++i) {
            const int code = (b.codes[j / 2 * 32 + i] >> j % 2 * 4 & 15) | (b.high[i] >> j & 1) << 4;
            to[32 * j + i] = scale[j] * float(code) - min[j];
        }
    }
}

void unpack_block(const BlockQ6_K& b, float* to) {
    const float d = b.d;
    for (int j = 0; j < 8; ++j) {
        const int half = j / 4, part = j % 4;
        for (int i = 0; i < 32; ++i) {
            const int low = b.codes[half * 64 + part % 2 * 32 + i] >> part / 2 * 4 & 15;
            const int code = low | (b.high[half * 32 + i] >> part * 2 & 3) << 4;
            to[32 * j + i] = d * float(b.scales[2 * j + i / 16]) * float(code - 32);
        }
    }
}

void unpack_block(const BlockIQ4_NL& b, float* to) {
    const float d = b.d;
    for (int i = 0; i < 32; ++i) to[i] = d * float(values_iq4[nibble(b.codes, i)]);
}

void unpack_block(const BlockIQ4_XS& b, float* to) {
    const float d = b.d;
    const uint64_t scales = scales_iq4(b);
    for (int j = 0; j < 8; ++j) {
        const float scale = d * float(int8_t(scales >> 8 * j));
        for (int i = 0; i < 32; ++i) to[32 * j + i] = scale * float(values_iq4[nibble(b.codes + 16 * j, i)]);
    }
}

void unpack_block(const BlockMXFP4& b, float* to) {
    const uint32_t bits = power_bits(b.exponent);
    const float power = f32_at(&bits);
    for (int i = 0; i < 32; ++i) to[i] = power * float(codes_fp4[nibble(b.codes, i)] - 12);
}

void unpack_block(const BlockTQ1_0& b, float* to) {
    const float d = b.d;
    uint8_t digit[256];
    digits_tq1(b, digit);
    for (int i = 0; i < 256; ++i) to[i] = d * float(digit[i] - 1);
}

void unpack_block(const BlockTQ2_0& b, float* to) {
    const float d = b.d;
    for (int j = 0; j < 8; ++j) {
        for (int i = 0; i < 32; ++i)
            to[32 * j + i] = d * float((b.codes[j / 4 * 32 + i] >> j % 4 * 2 & 3) - 1);
    }
}

template <class Values>
void unpack_block(const BlockOfCodes<Values>& b, float* to) {
    const float d = b.d * Values::unit;
    for (int j = 0; j < 8; ++j) {
        for (int i = 0; i < 32; ++i)
            to[32 * j + i] =
                d * float(b.scales[2 * j + i / 16]) * float(Values::values[nibble(b.codes + 16 * j, i)]);
    }
}

template <class Block>
    requires requires { typename Block::Repacked; }
void unpack_block(const Block& b, float* to) {
    unpack_block(repacked(b), to);
}

template <class Block, int elements>
void unpack_blocks(const void* from, int64_t n, float* to) {
    const Block* blocks = static_cast<const Block*>(from);
    for (int64_t b = 0; b < n / elements; ++b) unpack_block(blocks[b], to + b * elements);
}

void unpack_f16(const void* from, int64_t n, float* to) {
    const Half* p = static_cast<const Half*>(from);
    int64_t i = 0;
    for (; i + lanes <= n; i += lanes) store(to + i, load(p + i));
    if (i < n) store_part(to + i, load_part(p + i, n - i), n - i);
}

void unpack_bf16(const void* from, int64_t n, float* to) {
    const uint8_t* p = static_cast<const uint8_t*>(from);
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t u = static_cast<uint32_t>(u16_at(p + 2 * i)) << 16;
        to[i] = f32_at(&u);
    }
}

void narrow_f16(const float* from, int64_t n, void* to) {
    Half* p = static_cast<Half*>(to);
    int64_t i = 0;
    for (; i + lanes <= n; i += lanes) store(p + i, load(from + i));
    if (i < n) {
        Half last[lanes];
        store(last, load_part(from + i, n - i));
        memcpy(p + i, last, static_cast<size_t>(n - i) * sizeof(Half));
    }
}

void narrow_bf16(const float* from, int64_t n, void* to) {
    uint8_t* p = static_cast<uint8_t*>(to);
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t u = u32_at(from + i);
        const bool nan = (u & 0x7fffffff) > 0x7f800000;
        const uint16_t h = static_cast<uint16_t>(nan ? u >> 16 | 0x40 : (u + 0x7fff + (u >> 16 & 1)) >> 16);
        memcpy(p + 2 * i, &h, sizeof h);
    }
}

}  // namespace

void unpack(uint32_t type, const void* from, int64_t n, float* to) {
    switch (DType(type)) {
        case DType::F32:
            memcpy(to, from, static_cast<size_t>(n) * 4);
            return;
        case DType::F16:
            return unpack_f16(from, n, to);
        case DType::BF16:
            return unpack_bf16(from, n, to);
        case DType::Q4_0:
            return unpack_blocks<BlockQ4_0, 32>(from, n, to);
        case DType::Q4_1:
            return unpack_blocks<BlockQ4_1, 32>(from, n, to);
        case DType::Q5_0:
            return unpack_blocks<BlockQ5_0, 32>(from, n, to);
        case DType::Q5_1:
            return unpack_blocks<BlockQ5_1, 32>(from, n, to);
        case DType::Q8_0:
            return unpack_blocks<BlockQ8_0, 32>(from, n, to);
        case DType::Q2_K:
            return unpack_blocks<BlockQ2_K, 256>(from, n, to);
        case DType::Q3_K:
            return unpack_blocks<BlockQ3_K, 256>(from, n, to);
        case DType::Q4_K:
            return unpack_blocks<BlockQ4_K, 256>(from, n, to);
        case DType::Q5_K:
            return unpack_blocks<BlockQ5_K, 256>(from, n, to);
        case DType::Q6_K:
            return unpack_blocks<BlockQ6_K, 256>(from, n, to);
        case DType::IQ2_XXS:
            return unpack_blocks<BlockIQ2_XXS, 256>(from, n, to);
        case DType::IQ2_XS:
            return unpack_blocks<BlockIQ2_XS, 256>(from, n, to);
        case DType::IQ2_S:
            return unpack_blocks<BlockIQ2_S, 256>(from, n, to);
        case DType::IQ3_XXS:
            return unpack_blocks<BlockIQ3_XXS, 256>(from, n, to);
        case DType::IQ3_S:
            return unpack_blocks<BlockIQ3_S, 256>(from, n, to);
        case DType::IQ2_N:
            return unpack_blocks<BlockOfCodes<ValuesIQ2>, 256>(from, n, to);
        case DType::IQ3_XXS_N:
            return unpack_blocks<BlockOfCodes<ValuesIQ3_XXS>, 256>(from, n, to);
        case DType::IQ3_S_N:
            return unpack_blocks<BlockOfCodes<ValuesIQ3_S>, 256>(from, n, to);
        case DType::IQ4_NL:
            return unpack_blocks<BlockIQ4_NL, 32>(from, n, to);
        case DType::IQ4_XS:
            return unpack_blocks<BlockIQ4_XS, 256>(from, n, to);
        case DType::TQ1_0:
            return unpack_blocks<BlockTQ1_0, 256>(from, n, to);
        case DType::TQ2_0:
            return unpack_blocks<BlockTQ2_0, 256>(from, n, to);
        case DType::MXFP4:
            return unpack_blocks<BlockMXFP4, 32>(from, n, to);
        default:
            return;  // types of cache rows only, integers, or interleaved rows
    }
}

void narrow(uint32_t type, const float* from, int64_t n, void* to) {
    switch (DType(type)) {
        case DType::F16:
            return narrow_f16(from, n, to);
        case DType::BF16:
            return narrow_bf16(from, n, to);
        default:
            memcpy(to, from, static_cast<size_t>(n) * 4);
    }
}

}  // namespace slimrt::cpu::SLIMRT_ISA
