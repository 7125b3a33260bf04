// The block formats of quantised weights in GGUF, and how an element follows from a code. All members are
// bytes, so that a block may be at any address; numbers are little endian.
#pragma once

#include "kernels/cpu/dot.h"

namespace slimrt::cpu::SLIMRT_ISA {

static inline uint32_t u32_at(const void* p) {
    uint32_t u;
    memcpy(&u, p, sizeof u);
    return u;
}

static inline float f32_at(const void* p) {
    float f;
    memcpy(&f, p, sizeof f);
    return f;
}

static inline uint16_t u16_at(const void* p) {
    uint16_t u;
    memcpy(&u, p, sizeof u);
    return u;
}

/// The largest of n magnitudes, compared as integers: infinity, or NaN, if there is one.
static inline float largest(const float* x, int64_t n) {
    uint32_t high = 0;
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t magnitude = u32_at(x + i) & 0x7fffffff;
        high = magnitude > high ? magnitude : high;
    }
    return f32_at(&high);
}

/// Rounds to an integer, for |x| < 2^22: adding 1.5 * 2^23 leaves the integer in the low bits.
static inline int32_t nearest_even(float x) {
    const float magic = 0x1.8p23f, shifted = x + magic;
    return static_cast<int32_t>(u32_at(&shifted) - u32_at(&magic));
}

/// An f16 at any address that converts to float.
struct Scale {
    uint8_t bytes[2];
    operator float() const { return half_to_float(u16_at(bytes)); }
};

// Blocks of 32. Byte i of `codes`: element i in the low nibble, element i + 16 in the high one.

struct BlockQ4_0 {  // d * (code - 8)
    Scale d;
    uint8_t codes[16];
};
struct BlockQ4_1 {  // d * code + m
    Scale d, m;
    uint8_t codes[16];
};
struct BlockQ5_0 {  // d * (code - 16); bit i of `high` is the fifth bit of element i
    Scale d;
    uint8_t high[4], codes[16];
};
struct BlockQ5_1 {  // d * code + m
    Scale d, m;
    uint8_t high[4], codes[16];
};
struct BlockQ8_0 {  // d * code
    Scale d;
    int8_t codes[32];
};

struct BlockIQ4_NL {  // d * values_iq4[code]
    Scale d;
    uint8_t codes[16];
};
struct BlockMXFP4 {  // 2^(exponent - 128) * (codes_fp4[code] - 12)
    uint8_t exponent, codes[16];
};

/// The codebook of IQ4: non-uniform, dense about 0.
alignas(16) static constexpr int8_t values_iq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                      1,    13,   25,  38,  53,  69,  89,  113};
/// The values of FP4 (e2m1: sign, two bits of exponent, one of mantissa), doubled to be integers, plus 12.
alignas(16) static constexpr int8_t codes_fp4[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                                     12, 11, 10, 9,  8,  6,  4,  0};

// Blocks of 256, in groups of 16 or 32 elements with a scale (and a minimum) each.

struct BlockQ2_K {                  // groups of 16: d * (scale & 15) * code - dmin * (scale >> 4)
    uint8_t scales[16], codes[64];  // four elements, 32 apart, in a byte
    Scale d, dmin;
};
struct BlockQ3_K {                  // groups of 16: d * (scale - 32) * (code - 4); see scales_q3
    uint8_t high[32];               // bit j of byte i: third bit of element 32 j + i
    uint8_t codes[64], scales[12];  // codes as in Q2_K
    Scale d;
};
struct BlockQ4_K {  // groups of 32: d * scale * code - dmin * min; see eight_scales
    Scale d, dmin;
    uint8_t scales[12], codes[128];  // in every 32 bytes: low nibbles one group, high nibbles the next
};
struct BlockQ5_K {  // as Q4_K
    Scale d, dmin;
    uint8_t scales[12], high[32], codes[128];  // bit j of high[i]: fifth bit of element 32 j + i
};
struct BlockQ6_K {       // groups of 16: d * scale * (code - 32)
    uint8_t codes[128];  // in every 64 bytes: low nibbles 64 elements, high nibbles the next 64
    uint8_t high[64];    // upper two bits: four elements, 32 apart, in a byte
    int8_t scales[16];
    Scale d;
};

struct BlockIQ4_XS {  // groups of 32: d * (scale - 32) * values_iq4[code]; see scales_iq4
    Scale d;
    uint8_t high[2], low[4], codes[128];  // every 16 bytes are a group, as in IQ4_NL
};
struct BlockTQ1_0 {  // d * (digit - 1); see digits_tq1
    uint8_t codes[48], last[4];
    Scale d;
};
struct BlockTQ2_0 {     // d * (code - 1)
    uint8_t codes[64];  // as in Q2_K
    Scale d;
};

/// Code i of a block of 32 nibbles: low nibbles are the first half, high ones the second.
static inline int nibble(const uint8_t* codes, int i) { return codes[i % 16] >> (i < 16 ? 0 : 4) & 15; }

/// Spreads eight fields of `bits` bits to one byte each.
template <int bits>
static inline uint64_t spread(uint64_t fields) {
    constexpr uint64_t one = (1u << bits) - 1, two = (1u << 2 * bits) - 1, four = (1u << 4 * bits) - 1;
    fields = (fields | fields << (32 - 4 * bits)) & four * 0x0000000100000001;
    fields = (fields | fields << (16 - 2 * bits)) & two * 0x0001000100010001;
    return (fields | fields << (8 - bits)) & one * 0x0101010101010101;
}

/// The 8 scales of IQ4_XS minus 32, one to a byte: low 4 bits, then upper two.
static inline uint64_t scales_iq4(const BlockIQ4_XS& b) {
    constexpr uint64_t ones = 0x0101010101010101;
    const uint64_t codes = spread<4>(u32_at(b.low)) | spread<2>(u16_at(b.high)) << 4;
    return ((codes | 128 * ones) - 32 * ones) ^ 128 * ones;
}

/// Ternary digits, five to a byte (of the last bytes four): the byte is their base-3 fraction times 256, so
/// that multiplying by 3 carries the next digit out. First all first digits of 32 bytes, then all second
/// ones, and so on.
static inline void digits_tq1(const BlockTQ1_0& b, uint8_t digit[256]) {
    const auto some = [&](const uint8_t* from, int bytes, int digits) {
        for (int n = 0; n < digits; ++n) {
            int power = 1;
            for (int i = 0; i < n; ++i) power *= 3;
            for (int i = 0; i < bytes; ++i) *digit++ = static_cast<uint8_t>((from[i] * power & 255) * 3 >> 8);
        }
    };
    some(b.codes, 32, 5);
    some(b.codes + 32, 16, 5);
    some(b.last, 4, 4);
}

/// The 16 scales of Q3_K, six bits each.
static inline void scales_q3(const uint8_t packed[12], uint8_t scale[16]) {
    for (int i = 0; i < 16; ++i) {
        const int low = packed[i & 7] >> (i & 8 ? 4 : 0) & 15;
        scale[i] = static_cast<uint8_t>(low | (packed[8 + (i & 3)] >> (i / 4 * 2) & 3) << 4);
    }
}

}  // namespace slimrt::cpu::SLIMRT_ISA
