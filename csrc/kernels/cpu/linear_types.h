// The quantised weight types with a product of their own, as: element = scale * (code - offset), or
// scale * code + min. A unit is what is multiplied at a time: 256 elements, or two blocks of 32; a group has
// one scale. codes(blocks, j): the unit's elements 64 j ... 64 j + 63; scales(): all of a block's groups.
#pragma once

#include "kernels/cpu/blocks.h"

namespace slimrt::cpu::SLIMRT_ISA {

struct WeightQ8_0 {
    using Block = BlockQ8_0;
    static constexpr int block = 32, unit = 64, group = 32, offset = wide_offset;
    static constexpr bool has_min = false, is_wide = true;
    static Codes codes(const Block* b, int) { return wide(load_halves(b[0].codes, b[1].codes)); }
    static void scales(const Block& b, float* scale, float*) { *scale = b.d; }
};

struct WeightQ4_0 {
    using Block = BlockQ4_0;
    static constexpr int block = 32, unit = 64, group = 32, offset = 8;
    static constexpr bool has_min = false, is_wide = false;
    static Codes codes(const Block* b, int) { return load_nibbles(b[0].codes, b[1].codes); }
    static void scales(const Block& b, float* scale, float*) { *scale = b.d; }
};

template <class Block>
static inline void scales_and_minima(const Block& b, float* scale, float* min) {
    uint8_t s[8], m[8];
    scales_q4(b.scales, s, m);
    const float d = b.d, dmin = -b.dmin;
    for (int i = 0; i < 8; ++i) scale[i] = d * s[i];
    for (int i = 0; i < 8; ++i) min[i] = dmin * m[i];
}

struct WeightQ4_K {
    using Block = BlockQ4_K;
    static constexpr int block = 256, unit = 256, group = 32, offset = 0;
    static constexpr bool has_min = true, is_wide = false;
    static Codes codes(const Block* b, int j) { return fields(load_twice(b->codes + 32 * j), 0, 4, 15); }
    static void scales(const Block& b, float* scale, float* min) { scales_and_minima(b, scale, min); }
};

struct WeightQ5_K {
    using Block = BlockQ5_K;
    static constexpr int block = 256, unit = 256, group = 32, offset = 0;
    static constexpr bool has_min = true, is_wide = false;
    static Codes codes(const Block* b, int j) {
        return above(fields(load_twice(b->codes + 32 * j), 0, 4, 15),
                     fields(load_twice(b->high), 2 * j, 2 * j + 1, 1));
    }
    static void scales(const Block& b, float* scale, float* min) { scales_and_minima(b, scale, min); }
};

struct WeightQ6_K {
    using Block = BlockQ6_K;
    static constexpr int block = 256, unit = 256, group = 16, offset = 32;
    static constexpr bool has_min = false, is_wide = false;
    static Codes codes(const Block* b, int j) {
        const int nibble = j % 2 * 4;
        return above(fields(load_codes(b->codes + j / 2 * 64), nibble, nibble, 15),
                     fields(load_twice(b->high + j / 2 * 32), nibble, nibble + 2, 3));
    }
    static void scales(const Block& b, float* scale, float*) {
        const float d = b.d;
        for (int i = 0; i < 16; ++i) scale[i] = d * b.scales[i];
    }
};

}  // namespace slimrt::cpu::SLIMRT_ISA
