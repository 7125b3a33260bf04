// Quantised weights as GGUF stores them, 16 at a time: signed codes, their scale and what is added. A block
// begins at a multiple of two bytes, in MXFP4 anywhere. Formats: kernels/cpu/blocks.h. A code times its scale
// is exact in f32, so the weights are those of kernels/cpu/quant.cpp to the bit.
#pragma once

#include "kernels/cuda/numbers.cuh"

namespace slimrt::cuda {

/// Weight i is scale * (byte i of codes, signed) + offset.
struct Sixteen {
    uint32_t codes[4];
    float scale, offset = -0.0f;  // -0: the sum with it is the product, even for zeros

    __device__ float operator[](int i) const {
        return fmaf(scale, static_cast<float>(static_cast<int8_t>(codes[i / 4] >> i % 4 * 8)), offset);
    }
};

__device__ inline uint32_t word_at(const unsigned char* p) {
    const uint16_t* const halves = reinterpret_cast<const uint16_t*>(p);
    return halves[0] | uint32_t(halves[1]) << 16;
}
__device__ inline float f16_at(const unsigned char* p) {
    return from_f16(*reinterpret_cast<const uint16_t*>(p));
}
__device__ inline uint32_t in_each_byte(uint32_t x) { return x * 0x01010101; }
/// Subtracts `amount` from every byte; bytes are below 128.
__device__ inline uint32_t less_by(uint32_t bytes, uint32_t amount) {
    return ((bytes | in_each_byte(0x80)) - in_each_byte(amount)) ^ in_each_byte(0x80);
}
/// Spreads the low four bits, one to a byte.
__device__ inline uint32_t spread_bits(uint32_t bits) { return (bits & 15) * 0x00204081 & 0x01010101; }
/// Fields of `width` bits, from bit `shift` on, of each of 16 bytes.
__device__ inline void fields(const unsigned char* p, int shift, int width, uint32_t (&out)[4]) {
    for (int j = 0; j < 4; ++j) out[j] = word_at(p + 4 * j) >> shift & in_each_byte((1u << width) - 1);
}
/// Adds fields of 16 bytes, from bit `shift` on, to the codes, from bit `to` on.
__device__ inline void add_bits(const unsigned char* p, int shift, int width, int to, uint32_t (&codes)[4]) {
    uint32_t bits[4];
    fields(p, shift, width, bits);
    for (int j = 0; j < 4; ++j) codes[j] |= bits[j] << to;
}

/// Replaces each byte, which is below 16, by that byte of the 16 in `low` and `high`.
__device__ inline void look_up(uint64_t low, uint64_t high, uint32_t (&codes)[4]) {
    for (uint32_t& word : codes) {
        uint32_t found = 0;
        for (int i = 0; i < 32; i += 8) {
            const uint32_t code = word >> i & 255;
            found |= uint32_t((code < 8 ? low : high) >> code % 8 * 8 & 255) << i;
        }
        word = found;
    }
}
__device__ inline void look_up_iq4(uint32_t (&codes)[4]) {
    look_up(0xf6eaddcfbfad9881, 0x7159453526190d01, codes);
}

// Each type: elements and bytes of a block, and the 16 weights of a block from `at`, a multiple of 16, on.

template <int lead>  // bytes before the nibbles
struct Nibbles {
    static constexpr int kElements = 32;
    __device__ static Sixteen codes(const unsigned char* block, int at) {
        Sixteen s;
        fields(block + lead, at / 4, 4, s.codes);
        s.scale = f16_at(block);
        return s;
    }
    /// With fifth bits, which are just before the nibbles.
    __device__ static Sixteen five_bits(const unsigned char* block, int at) {
        Sixteen s = codes(block, at);
        const uint32_t high = word_at(block + lead - 4) >> at;
        for (int j = 0; j < 4; ++j) s.codes[j] |= spread_bits(high >> 4 * j) << 4;
        return s;
    }
};
struct WeightsQ4_0 : Nibbles<2> {
    static constexpr int kBytes = 18;
    __device__ static Sixteen load(const unsigned char* block, int at) {
        Sixteen s = codes(block, at);
        for (uint32_t& word : s.codes) word = less_by(word, 8);
        return s;
    }
};
struct WeightsQ4_1 : Nibbles<4> {
    static constexpr int kBytes = 20;
    __device__ static Sixteen load(const unsigned char* block, int at) {
        Sixteen s = codes(block, at);
        s.offset = f16_at(block + 2);
        return s;
    }
};
struct WeightsQ5_0 : Nibbles<6> {
    static constexpr int kBytes = 22;
    __device__ static Sixteen load(const unsigned char* block, int at) {
        Sixteen s = five_bits(block, at);
        for (uint32_t& word : s.codes) word = less_by(word, 16);
        return s;
    }
};
struct WeightsQ5_1 : Nibbles<8> {
    static constexpr int kBytes = 24;
    __device__ static Sixteen load(const unsigned char* block, int at) {
        Sixteen s = five_bits(block, at);
        s.offset = f16_at(block + 2);
        return s;
    }
};
struct WeightsQ8_0 {
    static constexpr int kElements = 32, kBytes = 34;
    __device__ static Sixteen load(const unsigned char* block, int at) {
        Sixteen s;
        fields(block + 2 + at, 0, 8, s.codes);
        s.scale = f16_at(block);
        return s;
    }
};

struct WeightsQ2_K {
    static constexpr int kElements = 256, kBytes = 84;
    __device__ static Sixteen load(const unsigned char* block, int at) {
        const int group = at / 32, scale = block[at / 16];
        Sixteen s;
        fields(block + 16 + group / 4 * 32 + at % 32, group % 4 * 2, 2, s.codes);
        s.scale = f16_at(block + 80) * static_cast<float>(scale & 15);
        s.offset = -(f16_at(block + 82) * static_cast<float>(scale >> 4));
        return s;
    }
};
struct WeightsQ3_K {
    static constexpr int kElements = 256, kBytes = 110;
    __device__ static Sixteen load(const unsigned char* block, int at) {
        const int group = at / 32, i = at / 16;
        const unsigned char* const scales = block + 96;
        const int scale = (scales[i % 8] >> i / 8 * 4 & 15) | (scales[8 + i % 4] >> i / 4 * 2 & 3) << 4;
        Sixteen s;
        fields(block + 32 + group / 4 * 32 + at % 32, group % 4 * 2, 2, s.codes);
        add_bits(block + at % 32, group, 1, 2, s.codes);
        for (uint32_t& word : s.codes) word = less_by(word, 4);
        s.scale = f16_at(block + 108) * static_cast<float>(scale - 32);
        return s;
    }
};
/// The scale and the minimum of a group of 32 of Q4_K and Q5_K, six bits each.
__device__ inline void six_bits(const unsigned char* block, int group, Sixteen* s) {
    const unsigned char* const packed = block + 4 + group % 4;
    const int a = packed[0], b = packed[4], c = packed[8];
    const int scale = group < 4 ? a & 63 : (c & 15) | a >> 6 << 4;
    const int min = group < 4 ? b & 63 : c >> 4 | b >> 6 << 4;
    s->scale = f16_at(block) * static_cast<float>(scale);
    s->offset = -(f16_at(block + 2) * static_cast<float>(min));
}
struct WeightsQ4_K {
    static constexpr int kElements = 256, kBytes = 144;
    __device__ static Sixteen load(const unsigned char* block, int at) {
        const int group = at / 32;
        Sixteen s;
        fields(block + 16 + group / 2 * 32 + at % 32, group % 2 * 4, 4, s.codes);
        six_bits(block, group, &s);
        return s;
    }
};
struct WeightsQ5_K {
    static constexpr int kElements = 256, kBytes = 176;
    __device__ static Sixteen load(const unsigned char* block, int at) {
        const int group = at / 32;
        Sixteen s;
        fields(block + 48 + group / 2 * 32 + at % 32, group % 2 * 4, 4, s.codes);
        add_bits(block + 16 + at % 32, group, 1, 4, s.codes);
        six_bits(block, group, &s);
        return s;
    }
};
struct WeightsQ6_K {
    static constexpr int kElements = 256, kBytes = 210;
    __device__ static Sixteen load(const unsigned char* block, int at) {
        const int half = at / 128, part = at / 32 % 4;
        Sixteen s;
        fields(block + half * 64 + part % 2 * 32 + at % 32, part / 2 * 4, 4, s.codes);
        add_bits(block + 128 + half * 32 + at % 32, part * 2, 2, 4, s.codes);
        for (uint32_t& word : s.codes) word = less_by(word, 32);
        s.scale = f16_at(block + 208) * static_cast<float>(static_cast<int8_t>(block[192 + at / 16]));
        return s;
    }
};

struct WeightsIQ4_NL : Nibbles<2> {
    static constexpr int kBytes = 18;
    __device__ static Sixteen load(const unsigned char* block, int at) {
        Sixteen s = codes(block, at);
        look_up_iq4(s.codes);
        return s;
    }
};
struct WeightsIQ4_XS {
    static constexpr int kElements = 256, kBytes = 136;
    __device__ static Sixteen load(const unsigned char* block, int at) {
        const int group = at / 32;
        const int low = block[4 + group / 2] >> group % 2 * 4 & 15;
        const int high = block[2 + group / 4] >> group % 4 * 2 & 3;
        Sixteen s;
        fields(block + 8 + 16 * group, at % 32 / 4, 4, s.codes);
        look_up_iq4(s.codes);
        s.scale = f16_at(block) * static_cast<float>((low | high << 4) - 32);
        return s;
    }
};
struct WeightsMXFP4 {
    static constexpr int kElements = 32, kBytes = 17;
    __device__ static Sixteen load(const unsigned char* block, int at) {
        Sixteen s;
        for (int j = 0; j < 4; ++j) {
            s.codes[j] = 0;
            for (int i = 0; i < 4; ++i) s.codes[j] |= uint32_t(block[1 + 4 * j + i] >> at / 4 & 15) << 8 * i;
        }
        look_up(0x0c08060403020100, 0xf4f8fafcfdfeff00, s.codes);
        const uint32_t e = block[0];
        s.scale = __uint_as_float(e > 1 ? (e - 1) << 23 : 0x200000u << e);
        return s;
    }
};
/// The types that IQ2 and IQ3 are held as (kernels/cpu/blocks_grid.h): numbers of 16 codes, and the unit as 1
/// / n.
template <uint64_t low, uint64_t high, int n>
struct WeightsOfCodes {
    static constexpr int kElements = 256, kBytes = 146;
    __device__ static Sixteen load(const unsigned char* block, int at) {
        Sixteen s;
        fields(block + 18 + at / 32 * 16, at % 32 / 4, 4, s.codes);
        look_up(low, high, s.codes);
        s.scale = f16_at(block) / n * static_cast<float>(static_cast<int8_t>(block[2 + at / 16]));
        return s;
    }
};
using WeightsIQ2_N = WeightsOfCodes<0x2b2b2b2b2b2b1908, 0xd5d5d5d5d5d5e7f8, 8>;
using WeightsIQ3_XXS_N = WeightsOfCodes<0x3e342c241c140c04, 0xc2ccd4dce4ecf4fc, 4>;
using WeightsIQ3_S_N = WeightsOfCodes<0x0f0d0b0907050301, 0xf1f3f5f7f9fbfdff, 1>;
struct WeightsTQ2_0 {
    static constexpr int kElements = 256, kBytes = 66;
    __device__ static Sixteen load(const unsigned char* block, int at) {
        const int group = at / 32;
        Sixteen s;
        fields(block + group / 4 * 32 + at % 32, group % 4 * 2, 2, s.codes);
        for (uint32_t& word : s.codes) word = less_by(word, 1);
        s.scale = f16_at(block + 64);
        return s;
    }
};

}  // namespace slimrt::cuda
