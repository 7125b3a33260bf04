// Quantised types of weights: how four codes, and the scales and minima of a chunk of 256 elements of k, are
// read from its bytes in shared memory. Formats: kernels/cpu/blocks.h. Four codes are elements 16 s + 4
// member ... of a group of 32, in two words of f16: elements 0, 2 and 1, 3.
#pragma once

#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/ptx.cuh"

namespace slimrt::cuda {

constexpr int kGroup = 32;

// Numbers in shared memory, at multiples of 2 bytes or of `unit`.
__device__ inline uint32_t half_word(const unsigned char* p) { return *reinterpret_cast<const uint16_t*>(p); }
__device__ inline float scale_at(const unsigned char* p) { return from_f16(uint16_t(half_word(p))); }
template <int unit>
__device__ inline uint32_t word_at(const unsigned char* p) {
    if constexpr (unit == 4) return *reinterpret_cast<const uint32_t*>(p);
    if constexpr (unit == 2) return half_word(p) | half_word(p + 2) << 16;
    const uintptr_t at = reinterpret_cast<uintptr_t>(p) % 4;
    const uint32_t* const words = reinterpret_cast<const uint32_t*>(p - at);
    return uint32_t((words[0] | uint64_t(words[1]) << 32) >> 8 * at);
}

/// Four codes as two words of f16: bytes 0, 2 and 1, 3 of `bytes`, each + 1024, plus `offset` (f16, twice).
__device__ inline uint2 codes_of_bytes(uint32_t bytes, uint32_t offset) {
    return {add_f16x2(__byte_perm(bytes, 0x64646464, 0x4240), offset),
            add_f16x2(__byte_perm(bytes, 0x64646464, 0x4341), offset)};
}
/// The same for the low or high nibbles; the offsets are added to 1024 + code and to 64 + code.
__device__ inline uint2 codes_of_nibbles(uint32_t bytes, bool high, uint32_t offset, uint32_t offset_high) {
    const uint32_t mask = high ? 0x00f000f0 : 0x000f000f, kilo = 0x64006400;
    const uint32_t unit = high ? 0x2c002c00 : 0x3c003c00, add = high ? offset_high : offset;
    return {multiply_add_f16x2(and_or(bytes, mask, kilo), unit, add),
            multiply_add_f16x2(and_or(bytes >> 8, mask, kilo), unit, add)};
}
/// The offset that makes code - n of 1024 + code.
__host__ __device__ constexpr uint32_t less(uint32_t n) { return (0xe400 + n) * 0x10001; }

__device__ inline uint32_t nibbles(uint32_t bytes, int high) { return bytes >> high * 4 & 0x0f0f0f0f; }
/// Spreads the low four bits, one to a byte.
__device__ inline uint32_t bits_to_bytes(uint32_t bits) { return (bits & 15) * 0x00204081 & 0x01010101; }

/// The low or high nibbles of four bytes, looked up in the 16 bytes of Table::words, which are numbers + 128.
/// All eight nibbles are looked up, four in a __byte_perm, in both halves of the table.
template <class Table>
__device__ inline uint2 looked_up(uint32_t bytes, bool high) {
    constexpr uint32_t a = Table::words[0], b = Table::words[1], c = Table::words[2], d = Table::words[3];
    const uint32_t place = bytes & 0x77777777, half = 0x32103210 | (bytes & 0x88888888) >> 1;
    const uint32_t first = __byte_perm(__byte_perm(a, b, place), __byte_perm(c, d, place), half);
    const uint32_t last =
        __byte_perm(__byte_perm(a, b, place >> 16), __byte_perm(c, d, place >> 16), half >> 16);
    return codes_of_bytes(__byte_perm(first, last, high ? 0x7531 : 0x6420), less(128));
}

// For few tokens codes need no addition: the bits of an integer are an f16 of 2^-24 times its value.

/// Bytes 0, 2 and 1, 3, times 2^-24.
__device__ inline uint2 small_of_bytes(uint32_t bytes) {
    return {__byte_perm(bytes, 0, 0x4240), __byte_perm(bytes, 0, 0x4341)};
}
/// Low nibbles times 2^-24, high ones times 2^-20.
__device__ inline uint2 small_of_nibbles(uint32_t bytes, bool high) {
    const uint32_t mask = high ? 0x00f000f0 : 0x000f000f;
    return {bytes & mask, bytes >> 8 & mask};
}

/// What the types share; the bytes of a block decide how rows and blocks are aligned. A type has codes(), of
/// four lanes `member`; scales(), one for each 32 or 16 elements; with kMins minima(), as many f16, which
/// times the returned factor are subtracted; maybe small_codes(), to be multiplied by small_scale(group).
/// kLargest: of magnitudes of codes; kLargestMinimum: of minima(), 0 if they may be any number.
template <int block, int bytes>
struct CodedWeight {
    static constexpr int kChunk = 256, kChunkBytes = 256 / block * bytes;
    static constexpr int kScales = 8;
    static constexpr bool kMins = false, kBf16 = false;
    static constexpr int kUnit = bytes % 4 == 0 ? 4 : bytes % 2 == 0 ? 2 : 1;
    static constexpr int kRowUnit = 16;

    static size_t row_bytes(int k) { return size_t(k) / block * bytes; }
    static __device__ uint32_t word(const unsigned char* p) { return word_at<kUnit>(p); }
};

/// Blocks of 32 that begin with an f16 scale.
template <int bytes>
struct SmallBlocks : CodedWeight<32, bytes> {
    static __device__ void scales(const unsigned char* row, float (&scale)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) scale[i] = scale_at(row + bytes * i);
    }
};
/// After the scale comes an f16 that is added.
template <int bytes>
struct RaisedBlocks : SmallBlocks<bytes> {
    static constexpr bool kMins = true;
    static constexpr float kLargestMinimum = 0;
    static __device__ float minima(const unsigned char* row, uint32_t (&codes)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned char* const p = row + 2 * i * bytes + 2;
            codes[i] = half_word(p) | half_word(p + bytes) << 16;
        }
        return -1;
    }
};

struct Q8_0Weight : SmallBlocks<34> {  // scale, 32 codes
    static constexpr float kLargest = 128;
    static __device__ uint2 codes(const unsigned char* row, int group, int s, int member) {
        return codes_of_bytes(word(row + 34 * group + 2 + 16 * s + 4 * member) ^ 0x80808080, less(128));
    }
};

struct Q4_0Weight : SmallBlocks<18> {  // scale, nibbles: elements 0 to 15 low, 16 to 31 high
    static constexpr float kLargest = 8;
    static __device__ uint2 codes(const unsigned char* row, int group, int s, int member) {
        return codes_of_nibbles(word(row + 18 * group + 2 + 4 * member), s == 1, less(8), 0xd480d480);
    }
};
struct Q4_1Weight : RaisedBlocks<20> {
    static constexpr float kLargest = 15;
    static __device__ uint2 codes(const unsigned char* row, int group, int s, int member) {
        return codes_of_nibbles(word(row + 20 * group + 4 + 4 * member), s == 1, less(0), 0xd400d400);
    }
};

/// Codes of blocks whose 32 fifth bits are just before the nibbles.
template <class Blocks>
__device__ inline uint32_t five_bits(const unsigned char* nibbles_at, int s, int member) {
    const uint32_t fifth = bits_to_bytes(Blocks::word(nibbles_at - 4) >> (16 * s + 4 * member));
    return nibbles(Blocks::word(nibbles_at + 4 * member), s) | fifth << 4;
}
struct Q5_0Weight : SmallBlocks<22> {
    static constexpr float kLargest = 16;
    static __device__ uint2 codes(const unsigned char* row, int group, int s, int member) {
        return codes_of_bytes(five_bits<Q5_0Weight>(row + 22 * group + 6, s, member), less(16));
    }
};
struct Q5_1Weight : RaisedBlocks<24> {
    static constexpr float kLargest = 31;
    static __device__ uint2 codes(const unsigned char* row, int group, int s, int member) {
        return codes_of_bytes(five_bits<Q5_1Weight>(row + 24 * group + 8, s, member), less(0));
    }
};

/// Scales and minima of six bits each, as in Q4_K and Q5_K.
template <int bytes>
struct SixBits : CodedWeight<256, bytes> {
    static constexpr bool kMins = true;
    static constexpr float kLargestMinimum = 63;
    static __device__ void scales(const unsigned char* row, float (&scale)[8]) {
        const uint32_t* const words = reinterpret_cast<const uint32_t*>(row);
        const uint32_t a = words[1], c = words[3];
        const uint32_t codes[2] = {a & kSix, (c & kFour) | (a >> 2 & kUpper)};
        const float d = scale_at(row);
#pragma unroll
        for (int i = 0; i < 8; ++i) scale[i] = d * float(codes[i / 4] >> i % 4 * 8 & 255);
    }
    static __device__ float minima(const unsigned char* row, uint32_t (&codes)[4]) {
        const uint32_t* const words = reinterpret_cast<const uint32_t*>(row);
        const uint32_t b = words[2], c = words[3];
        const uint32_t eight[2] = {b & kSix, (c >> 4 & kFour) | (b >> 2 & kUpper)};
#pragma unroll
        for (int i = 0; i < 4; ++i)
            codes[i] = add_f16x2(__byte_perm(eight[i / 2], 0x64646464, i % 2 ? 0x4342 : 0x4140), less(0));
        return scale_at(row + 2);
    }

  private:
    static constexpr uint32_t kSix = 0x3f3f3f3f, kFour = 0x0f0f0f0f, kUpper = 0x30303030;
};
struct Q4_KWeight : SixBits<144> {
    static constexpr float kLargest = 15;
    static __device__ uint2 codes(const unsigned char* row, int group, int s, int member) {
        const unsigned char* const p = row + 16 + group / 2 * 32 + 16 * s + 4 * member;
        return codes_of_nibbles(word(p), group % 2 == 1, less(0), 0xd400d400);
    }
    static __device__ uint2 small_codes(const unsigned char* row, int group, int s, int member) {
        return small_of_nibbles(word(row + 16 + group / 2 * 32 + 16 * s + 4 * member), group % 2 == 1);
    }
    static constexpr __device__ float small_scale(int group) { return group % 2 ? 0x1p20f : 0x1p24f; }
};
struct Q5_KWeight : SixBits<176> {
    static constexpr float kLargest = 31;
    static __device__ uint32_t bytes(const unsigned char* row, int group, int s, int member) {
        const int at = 16 * s + 4 * member;
        const uint32_t fifth = word(row + 16 + at) >> group & 0x01010101;
        return nibbles(word(row + 48 + group / 2 * 32 + at), group % 2) | fifth << 4;
    }
    static __device__ uint2 codes(const unsigned char* row, int group, int s, int member) {
        return codes_of_bytes(bytes(row, group, s, member), less(0));
    }
    static __device__ uint2 small_codes(const unsigned char* row, int group, int s, int member) {
        return small_of_bytes(bytes(row, group, s, member));
    }
    static constexpr __device__ float small_scale(int) { return 0x1p24f; }
};

/// Two bits of each of four elements, as in Q2_K, Q3_K and TQ2_0.
template <class W>
__device__ inline uint32_t two_bits(const unsigned char* codes, int group, int s, int member) {
    return W::word(codes + group / 4 * 32 + 16 * s + 4 * member) >> group % 4 * 2 & 0x03030303;
}
struct Q2_KWeight : CodedWeight<256, 84> {  // a byte has the scale and the minimum of 16
    static constexpr int kScales = 16;
    static constexpr bool kMins = true;
    static constexpr float kLargest = 3, kLargestMinimum = 15;
    static __device__ uint2 codes(const unsigned char* row, int group, int s, int member) {
        return codes_of_bytes(two_bits<Q2_KWeight>(row + 16, group, s, member), less(0));
    }
    static __device__ void scales(const unsigned char* row, float (&scale)[16]) {
        const float d = scale_at(row + 80);
#pragma unroll
        for (int i = 0; i < 16; ++i) scale[i] = d * float(word(row + i / 4 * 4) >> i % 4 * 8 & 15);
    }
    static __device__ float minima(const unsigned char* row, uint32_t (&codes)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const uint32_t four = nibbles(word(row + i / 2 * 4), 1);
            codes[i] = add_f16x2(__byte_perm(four, 0x64646464, i % 2 ? 0x4342 : 0x4140), less(0));
        }
        return scale_at(row + 82);
    }
};
struct Q3_KWeight : CodedWeight<256, 110> {
    static constexpr int kScales = 16;
    static constexpr float kLargest = 4;
    static __device__ uint2 codes(const unsigned char* row, int group, int s, int member) {
        const uint32_t third = word(row + 16 * s + 4 * member) >> group & 0x01010101;
        return codes_of_bytes(two_bits<Q3_KWeight>(row + 32, group, s, member) | third << 2, less(4));
    }
    /// Low four bits of each scale in 8 bytes, low nibbles first; then a byte has the upper two of every
    /// fourth.
    static __device__ void scales(const unsigned char* row, float (&scale)[16]) {
        const float d = scale_at(row + 108);
        const uint32_t upper = word(row + 104);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const uint32_t four = nibbles(word(row + 96 + i / 4 % 2 * 4), i / 8);
            const uint32_t six = four | (upper >> i / 4 * 2 & 0x03030303) << 4;
            scale[i] = d * float(int(six >> i % 4 * 8 & 255) - 32);
        }
    }
};

struct Q6_KWeight : CodedWeight<256, 210> {
    static constexpr int kScales = 16;  // of 16 elements each
    static constexpr float kLargest = 32;
    static __device__ uint2 codes(const unsigned char* row, int group, int s, int member) {
        const int half = group / 4, part = group % 4, at = 16 * s + 4 * member;
        const uint32_t low = nibbles(word(row + half * 64 + part % 2 * 32 + at), part / 2);
        const uint32_t high = word(row + 128 + half * 32 + at) >> part * 2 & 0x03030303;
        return codes_of_bytes(low | high << 4, less(32));
    }
    static __device__ void scales(const unsigned char* row, float (&scale)[16]) {
        const float d = scale_at(row + 208);
#pragma unroll
        for (int i = 0; i < 16; i += 2) {
            const uint32_t two = half_word(row + 192 + i);
            scale[i] = d * float(int8_t(two & 255));
            scale[i + 1] = d * float(int8_t(two >> 8));
        }
    }
};

struct TQ2_0Weight : CodedWeight<256, 66> {
    static constexpr float kLargest = 2;
    static __device__ uint2 codes(const unsigned char* row, int group, int s, int member) {
        return codes_of_bytes(two_bits<TQ2_0Weight>(row, group, s, member), less(1));
    }
    static __device__ void scales(const unsigned char* row, float (&scale)[8]) {
        for (float& one : scale) one = scale_at(row + 64);
    }
};

// Codes of four bits that index a table of numbers.

struct Iq4Table {
    static constexpr uint32_t words[4] = {0x3f2d1801, 0x766a5d4f, 0xa6998d81, 0xf1d9c5b5};
};
struct IQ4_NLWeight : SmallBlocks<18> {
    static constexpr float kLargest = 127;
    static __device__ uint2 codes(const unsigned char* row, int group, int s, int member) {
        return looked_up<Iq4Table>(word(row + 18 * group + 2 + 4 * member), s == 1);
    }
};
struct IQ4_XSWeight : CodedWeight<256, 136> {
    static constexpr float kLargest = 127;
    static __device__ uint2 codes(const unsigned char* row, int group, int s, int member) {
        return looked_up<Iq4Table>(word(row + 8 + 16 * group + 4 * member), s == 1);
    }
    static __device__ void scales(const unsigned char* row, float (&scale)[8]) {
        const float d = scale_at(row);
        const uint32_t low = word(row + 4), high = half_word(row + 2);
#pragma unroll
        for (int i = 0; i < 8; ++i)
            scale[i] = d * float(int((low >> 4 * i & 15) | (high >> 2 * i & 3) << 4) - 32);
    }
};
struct MXFP4Weight : CodedWeight<32, 17> {  // an exponent, nibbles
    static constexpr float kLargest = 12;
    struct Table {  // twice e2m1
        static constexpr uint32_t words[4] = {0x83828180, 0x8c888684, 0x7d7e7f80, 0x74787a7c};
    };
    static __device__ uint2 codes(const unsigned char* row, int group, int s, int member) {
        return looked_up<Table>(word(row + 17 * group + 1 + 4 * member), s == 1);
    }
    static __device__ void scales(const unsigned char* row, float (&scale)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const uint32_t e = row[17 * i];  // of 2^(e - 128)
            scale[i] = __uint_as_float(e > 1 ? (e - 1) << 23 : 0x200000u << e);
        }
    }
};

/// The types that IQ2 and IQ3 are held as (kernels/cpu/blocks_grid.h); their unit is 1 / n.
template <class Table, int n>
struct WeightOfCodes : CodedWeight<256, 146> {
    static constexpr int kScales = 16;
    static constexpr float kLargest = 62;
    static __device__ uint2 codes(const unsigned char* row, int group, int s, int member) {
        return looked_up<Table>(word(row + 18 + 16 * group + 4 * member), s == 1);
    }
    static __device__ void scales(const unsigned char* row, float (&scale)[16]) {
        const float d = scale_at(row) / n;
#pragma unroll
        for (int i = 0; i < 16; ++i) scale[i] = d * float(int8_t(row[2 + i]));
    }
};
struct Iq2Table {
    static constexpr uint32_t words[4] = {0xabab9988, 0xabababab, 0x55556778, 0x55555555};
};
struct Iq3XxsTable {
    static constexpr uint32_t words[4] = {0x9c948c84, 0xbeb4aca4, 0x646c747c, 0x424c545c};
};
struct Iq3STable {
    static constexpr uint32_t words[4] = {0x87858381, 0x8f8d8b89, 0x797b7d7f, 0x71737577};
};
struct IQ2_NWeight : WeightOfCodes<Iq2Table, 8> {};
struct IQ3_XXS_NWeight : WeightOfCodes<Iq3XxsTable, 4> {};
struct IQ3_S_NWeight : WeightOfCodes<Iq3STable, 1> {};

}  // namespace slimrt::cuda
