// Unpacks blocks of `lanes` rows side by side. Words of four bytes are transposed as stored, so that a lane
// is a row, and then split into codes in all lanes at once: for 4-bit codes that is half the transposing.
#pragma once

#include "kernels/cpu/interleave.h"
#include "kernels/cpu/linear_types.h"

namespace slimrt::cpu::SLIMRT_ISA {

/// A block of `lanes` of 16 interleaved rows: 32-bit words side by side, then the bytes that fill no word.
struct InterleavedAt {
    const uint8_t *words, *tail;
};

/// Block b of the rows [row, row + lanes).
template <class Weight>
static inline auto blocks_at(const uint8_t* w, size_t w_stride, int64_t row, int64_t b) {
    constexpr int64_t bytes = sizeof(typename Weight::Block);
    if constexpr (is_interleaved<Weight>) {
        const int64_t first = row & -kInterleavedRows, lane = row - first;
        const uint8_t* const all = w + first * w_stride + b * kInterleavedRows * bytes;
        return InterleavedAt{all + 4 * lane, all + bytes / 4 * 4 * kInterleavedRows + bytes % 4 * lane};
    } else {
        return RowsAt(w + row * w_stride + b * bytes, w_stride);
    }
}

/// N words, four at a time.
template <int N>
static inline void load_words(const RowsAt& row, int at, Words (&to)[N]) {
    for (int i = 0; i < N; i += 4) {
        Words four[4];
        load_words(row, at + 4 * i, four);
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) to[i + j] = four[j];
    }
}

// Interleaved rows: `at` is the byte in a block without its tail, rounded down to a word.
static inline Words load_word(const InterleavedAt& rows, int at) {
    Words w;
    memcpy(&w, rows.words + at / 4 * (4 * kInterleavedRows), sizeof w);
    return w;
}
template <int N>
static inline void load_words(const InterleavedAt& rows, int at, Words (&to)[N]) {
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) to[i] = load_word(rows, at + 4 * i);
}

/// The f16 scale d, which is first or last in a block and fills no word.
template <class Block>
static inline Vec load_d(const RowsAt& rows) {
    constexpr bool is_first = __builtin_offsetof(Block, d) == 0;
    return is_first ? half_of(load_word(rows, 0), 0) : half_of(load_word(rows, sizeof(Block) - 4), 1);
}
template <class Block>
static inline Vec load_d(const InterleavedAt& rows) {
    return load(reinterpret_cast<const Half*>(rows.tail));
}

/// The exponent byte, which fills no word, as byte 0 of a word.
static inline Words load_exponents(const RowsAt& rows) { return load_word(rows, 0); }
static inline Words load_exponents(const InterleavedAt& rows) {
    uint32_t bytes[lanes];
    for (int i = 0; i < lanes; ++i) bytes[i] = rows.tail[i];
    Words w;
    memcpy(&w, bytes, sizeof w);
    return w;
}

/// The same bit field of all bytes of eight words.
static inline void fields(const Words (&from)[8], int shift, int mask, Words (&to)[8]) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) to[i] = field(from[i], shift, mask);
}
static inline void insert_high_fields(const Words (&from)[8], int shift, int mask, Words (&to)[8]) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) to[i] = insert_high(to[i], field(from[i], shift, mask));
}

// unpack(from, block type, to) unpacks the same block of `lanes` rows. It calls to.scale(group, Vec) and
// to.minimum(group, Vec) for each group, and to.quads(first, Words[8]) for each 32 codes of a row: 8 quads (4
// codes in a word), from number `first` of the block on.

template <class From, class To>
static inline void unpack(const From& from, const BlockQ8_0*, To& to) {
    to.scale(0, load_d<BlockQ8_0>(from));
    Words codes[8];
    load_words(from, 2, codes);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) codes[i] = wide_words(codes[i]);
    to.quads(0, codes);
}

/// 32 nibbles from byte `at` on, as quads from number `first` on; `code` maps nibbles to codes.
template <class From, class To, class Code>
static inline void unpack_nibbles(const From& from, int at, int first, const Code& code, To& to) {
    Words codes[4], quads[8];
    load_words(from, at, codes);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        quads[i] = code(field(codes[i], 0, 15));
        quads[4 + i] = code(field(codes[i], 4, 15));
    }
    to.quads(first, quads);
}

template <class From, class To>
static inline void unpack(const From& from, const BlockQ4_0*, To& to) {
    to.scale(0, load_d<BlockQ4_0>(from));
    unpack_nibbles(from, 2, 0, [](Words w) { return w; }, to);
}

template <class From, class To>
static inline void unpack(const From& from, const BlockIQ4_NL*, To& to) {
    to.scale(0, load_d<BlockIQ4_NL>(from));
    unpack_nibbles(from, 2, 0, [](Words w) { return look_up(WeightIQ4_NL::table(), w); }, to);
}

template <class From, class To>
static inline void unpack(const From& from, const BlockMXFP4*, To& to) {
    to.scale(0, power_of(load_exponents(from)));
    unpack_nibbles(from, 1, 0, [](Words w) { return look_up(WeightMXFP4::table(), w); }, to);
}

template <class From, class To>
static inline void unpack(const From& from, const BlockIQ4_XS*, To& to) {
    const Words head = load_word(from, 0), low = load_word(from, 4);
    const Vec d = half_of(head, 0);
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) {
        const Vec upper = byte_of(field(head, g % 4 * 2, 3), 2 + g / 4);
        to.scale(g, fma(upper, splat(16), byte_of(field(low, g % 2 * 4, 15), g / 2) - splat(32)) * d);
    }
    for (int g = 0; g < 8; ++g)
        unpack_nibbles(
            from, 8 + 16 * g, 8 * g, [](Words w) { return look_up(WeightIQ4_NL::table(), w); }, to);
}

template <class From, class To, class Values>
static inline void unpack(const From& from, const BlockOfCodes<Values>*, To& to) {
    Words scales[4];
    load_words(from, 2, scales);
    const Vec d = load_d<BlockOfCodes<Values>>(from) * splat(Values::unit);
#pragma GCC unroll 16
    for (int g = 0; g < 16; ++g) to.scale(g, signed_byte_of(scales[g / 4], g % 4) * d);
    for (int j = 0; j < 8; ++j)
        unpack_nibbles(
            from, 18 + 16 * j, 8 * j, [](Words w) { return look_up(WeightOfCodes<Values>::table(), w); }, to);
}

template <class From, class To>
static inline void unpack(const From& from, const BlockTQ2_0*, To& to) {
    const Vec d = load_d<BlockTQ2_0>(from);
    for (int g = 0; g < 8; ++g) to.scale(g, d);
    for (int half = 0; half < 2; ++half) {
        Words codes[8], quads[8];
        load_words(from, 32 * half, codes);
        for (int j = 0; j < 4; ++j) {
            fields(codes, 2 * j, 3, quads);
            to.quads(32 * half + 8 * j, quads);
        }
    }
}

/// The 8 scales and minima of Q4_K and Q5_K, six bits each.
template <class From, class To>
static inline void unpack_six_bits(const From& from, To& to) {
    Words head[4];  // d and dmin, then 12 bytes of six-bit fields
    load_words(from, 0, head);
    const Vec d = half_of(head[0], 0), dmin = half_of(head[0], 1);
    const Words scales[2] = {field(head[1], 0, 63), insert_high(field(head[3], 0, 15), field(head[1], 6, 3))};
    const Words minima[2] = {field(head[2], 0, 63), insert_high(field(head[3], 4, 15), field(head[2], 6, 3))};
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) {
        to.scale(g, byte_of(scales[g / 4], g % 4) * d);
        to.minimum(g, byte_of(minima[g / 4], g % 4) * dmin);
    }
}

template <class From, class To>
static inline void unpack(const From& from, const BlockQ4_K*, To& to) {
    unpack_six_bits(from, to);
    for (int j = 0; j < 4; ++j) {
        Words codes[8], quads[8];
        load_words(from, 16 + 32 * j, codes);
        fields(codes, 0, 15, quads);
        to.quads(16 * j, quads);
        fields(codes, 4, 15, quads);
        to.quads(16 * j + 8, quads);
    }
}

template <class From, class To>
static inline void unpack(const From& from, const BlockQ5_K*, To& to) {
    unpack_six_bits(from, to);
    Words high[8];
    load_words(from, 16, high);
    for (int j = 0; j < 4; ++j) {
        Words codes[8], quads[8];
        load_words(from, 48 + 32 * j, codes);
        fields(codes, 0, 15, quads);
        insert_high_fields(high, 2 * j, 1, quads);
        to.quads(16 * j, quads);
        fields(codes, 4, 15, quads);
        insert_high_fields(high, 2 * j + 1, 1, quads);
        to.quads(16 * j + 8, quads);
    }
}

template <class From, class To>
static inline void unpack(const From& from, const BlockQ6_K*, To& to) {
    Words scales[4];
    load_words(from, 192, scales);
    const Vec d = load_d<BlockQ6_K>(from);
#pragma GCC unroll 16
    for (int g = 0; g < 16; ++g) to.scale(g, signed_byte_of(scales[g / 4], g % 4) * d);
    for (int half = 0; half < 2; ++half) {
        Words high[8];
        load_words(from, 128 + 32 * half, high);
        for (int j = 0; j < 2; ++j) {
            Words codes[8], quads[8];
            load_words(from, 64 * half + 32 * j, codes);
            fields(codes, 0, 15, quads);
            insert_high_fields(high, 2 * j, 3, quads);
            to.quads(32 * half + 8 * j, quads);
            fields(codes, 4, 15, quads);
            insert_high_fields(high, 2 * j + 4, 3, quads);
            to.quads(32 * half + 8 * j + 16, quads);
        }
    }
}

// Types that are only held interleaved.

/// 32 nibbles and their fifth bits: bit q of byte b of `high` belongs to element 4 q + b.
template <class From, class To>
static inline void unpack_five_bits(const From& from, int at, To& to) {
    Words high[8], quads[8], codes[4];
    high[0] = load_word(from, at);
    load_words(from, at + 4, codes);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)
        quads[i] = insert_high(field(codes[i % 4], i / 4 * 4, 15), field(high[0], i, 1));
    to.quads(0, quads);
}

template <class From, class To>
static inline void unpack(const From& from, const BlockQ5_0*, To& to) {
    to.scale(0, load_d<BlockQ5_0>(from));
    unpack_five_bits(from, 2, to);
}

/// d and m at the start of blocks of 32.
template <class From, class To>
static inline void unpack_scale_and_minimum(const From& from, To& to) {
    const Words head = load_word(from, 0);
    to.scale(0, half_of(head, 0));
    to.minimum(0, splat(0) - half_of(head, 1));
}

template <class From, class To>
static inline void unpack(const From& from, const BlockQ4_1*, To& to) {
    unpack_scale_and_minimum(from, to);
    unpack_nibbles(from, 4, 0, [](Words w) { return w; }, to);
}

template <class From, class To>
static inline void unpack(const From& from, const BlockQ5_1*, To& to) {
    unpack_scale_and_minimum(from, to);
    unpack_five_bits(from, 4, to);
}

template <class From, class To>
static inline void unpack(const From& from, const BlockQ2_K*, To& to) {
    const Words head = load_word(from, 80);
    const Vec d = half_of(head, 0), dmin = half_of(head, 1);
    Words both[4];
    load_words(from, 0, both);
#pragma GCC unroll 16
    for (int g = 0; g < 16; ++g) {
        to.scale(g, byte_of(field(both[g / 4], 0, 15), g % 4) * d);
        to.minimum(g, byte_of(field(both[g / 4], 4, 15), g % 4) * dmin);
    }
#pragma GCC unroll 1
    for (int half = 0; half < 2; ++half) {
        Words codes[8], quads[8];
        load_words(from, 16 + 32 * half, codes);
#pragma GCC unroll 1
        for (int j = 0; j < 4; ++j) {
            fields(codes, 2 * j, 3, quads);
            to.quads(32 * half + 8 * j, quads);
        }
    }
}

/// Three planes of 32 bytes. Each byte has two 3-bit codes (6 sets of 32 elements); the upper two bits of a
/// byte hold the codes of the last two sets, split over the planes (join_high_bits in interleave.cpp).
template <class From, class To>
static inline void unpack(const From& from, const BlockQ3_K*, To& to) {
    const Words low[2] = {load_word(from, 96), load_word(from, 100)}, upper = load_word(from, 104);
    const Vec d = load_d<BlockQ3_K>(from);
#pragma GCC unroll 16
    for (int g = 0; g < 16; ++g) {
        const Words six = insert_high(field(low[g / 4 % 2], g / 8 * 4, 15), field(upper, g / 4 * 2, 3));
        to.scale(g, (byte_of(six, g % 4) - splat(32)) * d);
    }
    Words codes[3][8], quads[8];
#pragma GCC unroll 1
    for (int plane = 0; plane < 3; ++plane) {
        load_words(from, 32 * plane, codes[plane]);
#pragma GCC unroll 1
        for (int second = 0; second < 2; ++second) {
            fields(codes[plane], 3 * second, 7, quads);
            to.quads(16 * plane + 8 * second, quads);
        }
    }
#pragma GCC unroll 1
    for (int j = 0; j < 2; ++j) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) quads[i] = field(codes[j][i], 6, 3) | field(codes[2][i], 4 + j, 4);
        to.quads(48 + 8 * j, quads);
    }
}

/// Prefetches memory in the order of addresses, which is read much faster than pieces of many rows, evenly
/// during other work. Into L2: it is further ahead than L1 holds.
struct SequentialPrefetch {
    const uint8_t *next, *upto;
    Hint hint = Hint::t1;

    void advance(int64_t bytes) {
        upto += bytes;
        for (; next < upto; next += 64) prefetch(next, 1, hint);
    }
};

}  // namespace slimrt::cpu::SLIMRT_ISA
