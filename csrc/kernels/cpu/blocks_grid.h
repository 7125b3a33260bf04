// The GGUF types IQ2 and IQ3, whose codes index a grid (a codebook of vectors), and the blocks of 4-bit codes
// they are converted to when they are loaded: a sign bit and three bits for one of up to eight magnitudes.
// Nothing is rounded.
#pragma once

#include "kernels/cpu/blocks.h"
#include "kernels/cpu/grids.h"

namespace slimrt::cpu::SLIMRT_ISA {

// The value of each 4-bit code, and the factor of the block's d.

struct ValuesIQ2 {
    alignas(16) static constexpr int8_t values[16] = {8,  25,  43,  43,  43,  43,  43,  43,
                                                      -8, -25, -43, -43, -43, -43, -43, -43};
    static constexpr float unit = 1.0f / 8;
};
struct ValuesIQ3_XXS {
    alignas(16) static constexpr int8_t values[16] = {4,  12,  20,  28,  36,  44,  52,  62,
                                                      -4, -12, -20, -28, -36, -44, -52, -62};
    static constexpr float unit = 1.0f / 4;
};
struct ValuesIQ3_S {
    alignas(16) static constexpr int8_t values[16] = {1,  3,  5,  7,  9,  11,  13,  15,
                                                      -1, -3, -5, -7, -9, -11, -13, -15};
    static constexpr float unit = 1;
};

template <class Values>
struct BlockOfCodes {  // groups of 16: d * unit * scale * values[code]
    Scale d;
    int8_t scales[16];
    uint8_t codes[128];  // as in IQ4_XS
};

struct BlockIQ2_XXS {
    using Repacked = BlockOfCodes<ValuesIQ2>;
    Scale d;
    struct {  // of 32 elements: four grid indices, then 7 sign bits for each 8 elements, then 4 bits of scale
        uint8_t indices[4], signs[4];
    } groups[8];
};
struct BlockIQ2_XS {
    using Repacked = BlockOfCodes<ValuesIQ2>;
    Scale d;
    uint8_t indices[32][2], scales[8];  // 9 bits of grid index, 7 sign bits
};
struct BlockIQ2_S {
    using Repacked = BlockOfCodes<ValuesIQ2>;
    Scale d;
    uint8_t indices[32], signs[32], high[8], scales[8];  // high: two more bits of each index
};
struct BlockIQ3_XXS {
    using Repacked = BlockOfCodes<ValuesIQ3_XXS>;
    Scale d;
    uint8_t indices[64], signs[8][4];  // of each 32 elements as in IQ2_XXS
};
struct BlockIQ3_S {
    using Repacked = BlockOfCodes<ValuesIQ3_S>;
    Scale d;
    uint8_t indices[64], high[8], signs[32], scales[4];  // high: the ninth bit of each index
};

/// The eighth sign from the other seven: the number of minus signs is even.
static inline int eight_signs(uint32_t seven) {
    seven &= 127;
    return static_cast<int>(seven | static_cast<uint32_t>(__builtin_popcount(seven) & 1) << 7);
}
/// The scale 2 s + 1, with s at nibble i.
static inline int8_t odd_scale(const uint8_t* scales, int i) {
    return static_cast<int8_t>(2 * (scales[i / 2] >> i % 2 * 4 & 15) + 1);
}

/// Writes elements 8 i ... 8 i + 7, where zeros are: magnitudes of `bits` bits each, and signs.
template <int bits, class Block>
static inline void put_eight(Block* to, int i, uint32_t magnitudes, int signs) {
    uint8_t* const codes = to->codes + i / 4 * 16 + i % 2 * 8;
    uint64_t eight;
    memcpy(&eight, codes, sizeof eight);
    eight |= (spread<bits>(magnitudes) | spread<1>(static_cast<uint64_t>(signs)) << 3) << i % 4 / 2 * 4;
    memcpy(codes, &eight, sizeof eight);
}
/// Two grid entries of four magnitudes.
static inline uint32_t two_fours(const uint16_t* grid, int first, int second) {
    return static_cast<uint32_t>(grid[first] | grid[second] << 12);
}

static inline void repack_into(const BlockIQ2_XXS& b, BlockIQ2_XXS::Repacked* to) {
    for (int i = 0; i < 32; ++i) {
        const uint32_t word = u32_at(b.groups[i / 4].signs);
        put_eight<2>(to, i, grid_iq2_xxs[b.groups[i / 4].indices[i % 4]], eight_signs(word >> i % 4 * 7));
        if (i < 16) to->scales[i] = static_cast<int8_t>(2 * (u32_at(b.groups[i / 2].signs) >> 28) + 1);
    }
}
static inline void repack_into(const BlockIQ2_XS& b, BlockIQ2_XS::Repacked* to) {
    for (int i = 0; i < 32; ++i) {
        const int index = u16_at(b.indices[i]);
        put_eight<2>(to, i, grid_iq2_xs[index & 511], eight_signs(static_cast<uint32_t>(index >> 9)));
        if (i < 16) to->scales[i] = odd_scale(b.scales, i);
    }
}
static inline void repack_into(const BlockIQ2_S& b, BlockIQ2_S::Repacked* to) {
    for (int i = 0; i < 32; ++i) {
        const int index = b.indices[i] | (b.high[i / 4] >> i % 4 * 2 & 3) << 8;
        put_eight<2>(to, i, grid_iq2_s[index], b.signs[i]);
        if (i < 16) to->scales[i] = odd_scale(b.scales, i);
    }
}
static inline void repack_into(const BlockIQ3_XXS& b, BlockIQ3_XXS::Repacked* to) {
    for (int i = 0; i < 32; ++i) {
        const uint32_t fours = two_fours(grid_iq3_xxs, b.indices[2 * i], b.indices[2 * i + 1]);
        put_eight<3>(to, i, fours, eight_signs(u32_at(b.signs[i / 4]) >> i % 4 * 7));
        if (i < 16) to->scales[i] = static_cast<int8_t>(2 * (u32_at(b.signs[i / 2]) >> 28) + 1);
    }
}
static inline void repack_into(const BlockIQ3_S& b, BlockIQ3_S::Repacked* to) {
    const auto index = [&](int i) { return b.indices[i] | (b.high[i / 8] >> i % 8 & 1) << 8; };
    for (int i = 0; i < 32; ++i) {
        put_eight<3>(to, i, two_fours(grid_iq3_s, index(2 * i), index(2 * i + 1)), b.signs[i]);
        if (i < 16) to->scales[i] = odd_scale(b.scales, i / 2);
    }
}

/// A block with the same values.
template <class Block>
static inline typename Block::Repacked repacked(const Block& b) {
    typename Block::Repacked to = {};
    to.d = b.d;
    repack_into(b, &to);
    return to;
}

}  // namespace slimrt::cpu::SLIMRT_ISA
