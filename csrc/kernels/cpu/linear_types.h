// The quantised weight types that have kernels: element = scale * (code - offset), or scale * code - min.
// "Code" is the stored integer. A unit is what is multiplied at a time: 256 elements, or unit_blocks blocks
// of 32; a group shares one scale. codes(blocks, j): elements 64 j ... 64 j + 63 of the unit; scales(): of
// all groups of the unit. max_code: the largest code, where that is less than 63. is_wide: codes use all 8
// bits, signed. is_rare, is_rare_alone (only where the type has interleaved rows too): see linear_quant.h.
#pragma once

#include "kernels/cpu/blocks_grid.h"

namespace slimrt::cpu::SLIMRT_ISA {

struct WeightQ8_0 {
    using Block = BlockQ8_0;
    static constexpr int block = 32, unit = unit_blocks * block, group = 32, offset = wide_offset;
    static constexpr bool has_min = false, is_wide = true;
    static Codes codes(const Block* b, int j) {
        return wide(load_halves(b[2 * j].codes, b[2 * j + 1].codes));
    }
    static Scales scales(const Block* b) { return blocks_apart(&b->d, sizeof *b); }
};

struct WeightQ4_0 {
    using Block = BlockQ4_0;
    static constexpr int block = 32, unit = unit_blocks * block, group = 32, offset = 8;
    static constexpr bool has_min = false, is_wide = false, is_rare_alone = true;
    static constexpr int max_code = 15;
    static Codes codes(const Block* b, int j) { return load_nibbles(b[2 * j].codes, b[2 * j + 1].codes); }
    static Scales scales(const Block* b) { return blocks_apart(&b->d, sizeof *b); }
};

struct WeightQ4_K {
    using Block = BlockQ4_K;
    static constexpr int block = 256, unit = 256, group = 32, offset = 0;
    static constexpr bool has_min = true, is_wide = false, is_rare_alone = true;
    static constexpr int max_code = 15;
    static Codes codes(const Block* b, int j) { return fields(load_twice(b->codes + 32 * j), 0, 4, 15); }
    static Scales scales(const Block* b) { return eight_scales(b); }
};

struct WeightQ5_K {
    using Block = BlockQ5_K;
    static constexpr int block = 256, unit = 256, group = 32, offset = 0;
    static constexpr bool has_min = true, is_wide = false, is_rare_alone = true;
    static constexpr int max_code = 31;
    static Codes codes(const Block* b, int j) {
        return insert_high(fields(load_twice(b->codes + 32 * j), 0, 4, 15),
                           fields(load_twice(b->high), 2 * j, 2 * j + 1, 1));
    }
    static Scales scales(const Block* b) { return eight_scales(b); }
};

struct WeightQ6_K {
    using Block = BlockQ6_K;
    static constexpr int block = 256, unit = 256, group = 16, offset = 32;
    static constexpr bool has_min = false, is_wide = false;
    static Codes codes(const Block* b, int j) {
        const int nibble = j % 2 * 4;
        return insert_high(fields(load_codes(b->codes + j / 2 * 64), nibble, nibble, 15),
                           fields(load_twice(b->high + j / 2 * 32), nibble, nibble + 2, 3));
    }
    static Scales scales(const Block* b) { return sixteen_scales(b->scales, b->d); }
};

// Types whose codes index a table of values, which are used as wide codes or with an offset.

struct WeightIQ4_NL {
    using Block = BlockIQ4_NL;
    static constexpr int block = 32, unit = unit_blocks * block, group = 32, offset = wide_offset;
    static constexpr bool has_min = false, is_wide = true, is_rare = true;
    static Words table() { return wide_words(load_table(values_iq4)); }
    static Codes codes(const Block* b, int j) {
        return look_up(table(), load_nibbles(b[2 * j].codes, b[2 * j + 1].codes));
    }
    static Scales scales(const Block* b) { return blocks_apart(&b->d, sizeof *b); }
};

struct WeightIQ4_XS {
    using Block = BlockIQ4_XS;
    static constexpr int block = 256, unit = 256, group = 32, offset = wide_offset;
    static constexpr bool has_min = false, is_wide = true, is_rare = true;
    static Codes codes(const Block* b, int j) {
        return look_up(WeightIQ4_NL::table(), load_nibbles(b->codes + 32 * j, b->codes + 32 * j + 16));
    }
    static Scales scales(const Block* b) { return eight_signed(scales_iq4(*b), b->d); }
};

struct WeightMXFP4 {
    using Block = BlockMXFP4;
    static constexpr int block = 32, unit = unit_blocks * block, group = 32, offset = 12;
    static constexpr bool has_min = false, is_wide = false, is_rare = true;
    static constexpr int max_code = 24;
    static Words table() { return load_table(codes_fp4); }
    static Codes codes(const Block* b, int j) {
        return look_up(table(), load_nibbles(b[2 * j].codes, b[2 * j + 1].codes));
    }
    static Scales scales(const Block* b) { return powers_apart(&b->exponent, sizeof *b); }
};

/// The table of a type, biased by its largest value where that keeps all codes below 64. The correction is
/// then no larger than the values themselves, and adds no rounding error.
template <class Values>
struct BiasedValues {
    static constexpr int most = Values::values[7], bias = most < 32 ? most : 0;
    alignas(16) int8_t codes[16];
    constexpr BiasedValues() : codes() {
        for (int i = 0; i < 16; ++i) codes[i] = static_cast<int8_t>(Values::values[i] + bias);
    }
};
template <class Values>
static constexpr BiasedValues<Values> biased_values;

template <class Values>
struct WeightOfCodes {
    using Block = BlockOfCodes<Values>;
    static constexpr int block = 256, unit = 256, group = 16, bias = BiasedValues<Values>::bias;
    static constexpr bool has_min = false, is_wide = bias == 0, is_rare = true;
    static constexpr int offset = is_wide ? wide_offset : bias;
    static Words table() {
        const Words codes = load_table(biased_values<Values>.codes);
        return is_wide ? wide_words(codes) : codes;
    }
    static Codes codes(const Block* b, int j) {
        return look_up(table(), load_nibbles(b->codes + 32 * j, b->codes + 32 * j + 16));
    }
    static Scales scales(const Block* b) { return sixteen_scales(b->scales, b->d * Values::unit); }
};

struct WeightTQ2_0 {
    using Block = BlockTQ2_0;
    static constexpr int block = 256, unit = 256, group = 32, offset = 1;
    static constexpr bool has_min = false, is_wide = false, is_rare = true;
    static constexpr int max_code = 3;
    static Codes codes(const Block* b, int j) {
        return fields(load_twice(b->codes + j / 2 * 32), j % 2 * 4, j % 2 * 4 + 2, 3);
    }
    static Scales scales(const Block* b) { return eight_signed(0x0101010101010101, b->d); }
};

// Types that are only held interleaved (kernels/cpu/interleave.h) and have no kernel for single rows.

struct WeightQ4_1 {
    using Block = BlockQ4_1;
    static constexpr int block = 32, group = 32, offset = 0, max_code = 15;
    static constexpr bool has_min = true, is_wide = false, is_rare = true;
};
struct WeightQ5_0 {
    using Block = BlockQ5_0;
    static constexpr int block = 32, group = 32, offset = 16, max_code = 31;
    static constexpr bool has_min = false, is_wide = false, is_rare = true;
};
struct WeightQ5_1 {
    using Block = BlockQ5_1;
    static constexpr int block = 32, group = 32, offset = 0, max_code = 31;
    static constexpr bool has_min = true, is_wide = false, is_rare = true;
};
struct WeightQ2_K {
    using Block = BlockQ2_K;
    static constexpr int block = 256, group = 16, offset = 0, max_code = 3;
    static constexpr bool has_min = true, is_wide = false, is_rare = true;
};
struct WeightQ3_K {
    using Block = BlockQ3_K;
    static constexpr int block = 256, group = 16, offset = 4, max_code = 7;
    static constexpr bool has_min = false, is_wide = false, is_rare = true;
};

template <class Row>
struct Interleaved : Row {
    static constexpr bool is_interleaved = true;
};
template <class Weight>
constexpr bool is_interleaved = requires { Weight::is_interleaved; };

}  // namespace slimrt::cpu::SLIMRT_ISA
