// Products of quantised weights with int8 activations, for the units compiled once per ISA. A "code" is a
// quantised value as it is stored. SLIMRT_DOT names the header that defines the following for one instruction
// set.
//
// half_to_float(bits), store(Half*, Vec).
//
// Codes: 64 codes of 8 bits, of weights (unsigned) or activations (signed).
// - load_codes(p): 64 bytes; load_halves(p, q): 32 and 32; load_twice(p): 32 bytes, twice.
// - load_nibbles(p, q): the low nibbles of 16 bytes, their high nibbles, and the same of q.
// - fields(c, s, t, mask): c >> s & mask in the first half, c >> t & mask in the second.
// - insert_high(c, d): c + 16 d, the high bits d above the low four bits c.
// - look_up(table, c): table[c] for the 16 entries of load_table(p), which are Words.
//
// Sums: int32 sums of products, in the order of the codes; Acc: a float for each of them, with fma and sum.
// - dot<wide>(start, w, x): adds the products. w is below 64, or (wide) comes from wide(c) for signed 8-bit
//   c, which adds the zero point wide_offset.
// - start_halves(p), start_quarters(p): sums that start from 2 or 4 integers, each in one lane of its half or
//   quarter, and from sum_bias elsewhere; zero_sums(): all start from sum_bias, which to_acc and to_vec
//   subtract. Their types may differ.
// - to_acc(sums): to floats; if joins_steps, for groups of 32 to_acc(sums, next): of 64 codes and the 64
//   after them.
// - dot_rows: how many rows are best multiplied side by side.
//
// Scales: 16 floats, with * and store. unit_blocks blocks of 32 are multiplied at a time.
// - Of activations: load_blocks(p): unit_blocks floats; load_eight(p, q): 8 and 8; load_each_twice(p): 8,
//   each twice.
// - Of weights: blocks_apart(p, stride): unit_blocks f16 values, `stride` bytes apart; powers_apart(p,
//   stride): as many E8M0 exponents, see power_bits; sixteen_scales(p, d): d times 16 int8;
//   eight_signed(bytes, d): d times 8 int8, the other 8 are undefined.
// - eight_scales(p): 8 scales and 8 minima from the first 16 bytes of a block of Q4_K or Q5_K.
// - spread_halves(s, j): s[2j] for the first half of the sums, s[2j + 1] for the second (if joins_steps,
//   those of an odd j and of j - 1); spread_quarters: four, from s[4j].
// - add_last_eight(acc, s): adds s[8 ... 15], each to any lane of acc.
//
// PanelCodes: a quad (4 codes) in each of `lanes` lanes; PanelSums: a sum in each. See linear_panel.h.
// - load_panel(p); splat_quad_codes(p): one quad in all lanes; splat_sum(p): one integer in all lanes;
//   dot<wide>; to_vec.
// - panel_vectors: vectors of rows in a register tile. few_in_registers: whether there are registers for
//   linear_few.h.
// - PanelPairs: 16-bit sums of two products each, below `max` (0: not available): of(w, x), plus(w, x),
//   added_to(sums). Adding in 16 bits first takes fewer instructions where codes are not wide.
//
// Words: four bytes of each of `lanes` rows, see linear_unpack.h.
// - load_words(rows, at, to[4]), perhaps to[8]: the words from byte `at` of the rows on; load_word(rows, at).
// - field(w, shift, mask): each byte >> shift & mask; insert_high(w, v): w + 16 v; wide_words(w): as wide();
//   subtract_offset(w, by): each byte minus that, if panels are signed.
// - look_up(table, w): as for Codes. power_of(w): byte 0 of each row as an E8M0 exponent.
// - byte_of(w, i), signed_byte_of(w, i): byte i of each row as a float; half_of(w, i): f16 number i of each
//   row.
// - store_words(p, w).
//
// ByElement: multiplication by an element of a vector of activations ("by element" instructions of ARM), n
// elements at a time. n = 1: not available, and of what follows there are only side_by_side, tokens and
// dot_quad<wide>(sums, words, p), which multiplies by the quad at p.
// - Floats: n activations; load(p); fma(w, x, i, sums): w times element i.
// - side_by_side: how many codes of a row are adjacent in a panel of signed codes.
// - tokens: how many tokens' sums a vector has. If side_by_side and tokens are not 4 and 1, there are
//   store_words(p, first, second), of consecutive words, and store_scales(rows, p); of_token(sums, next, t)
//   undoes their order.
// - Codes: n quads of each of `tokens` tokens; load(p, next): the second token's are `next` bytes further;
//   start(): sum_bias in all sums; dot<wide>(sums, w, x, i): with the i-th side_by_side codes. load_tokens(p,
//   next): a float of each token.
// - of_words(w): as PanelCodes; computed(v) makes the compiler compute v here rather than where it is used.
//
// Int16Products: see linear_int16.h; min_tokens 0: they would not be faster.
#pragma once

#include "kernels/cpu/simd.h"

namespace slimrt::cpu::SLIMRT_ISA {

/// p + bytes, hidden from the compiler, which would otherwise keep a table of such addresses.
static inline const uint8_t* step(const uint8_t* p, size_t bytes) {
    p += bytes;
    asm("" : "+r"(p));
    return p;
}

/// The bits of the float 2^(e - 128), half the E8M0 scale 2^(e - 127) since codes_fp4 are doubled: the larger
/// of two integers, the second for 0 and 1, where it is subnormal.
static constexpr uint32_t power_bits(uint8_t e) {
    const int32_t normal = (e - 1) * (1 << 23), subnormal = (e + 1) << 21;
    return static_cast<uint32_t>(normal > subnormal ? normal : subnormal);
}

/// A table: computing one takes longer than multiplying its block.
struct Powers {
    uint32_t bits[256];
    constexpr Powers() : bits() {
        for (int e = 0; e < 256; ++e) bits[e] = power_bits(static_cast<uint8_t>(e));
    }
};
alignas(64) static constexpr Powers powers;

struct NoPairs {
    static constexpr int max = 0;
};

/// Addresses of `lanes` rows, `stride` bytes apart: one pointer for every four rows.
struct RowsAt {
    const uint8_t* fours[lanes / 4];
    size_t stride;

    RowsAt(const uint8_t* first, size_t bytes) : stride(bytes) {
        for (auto& row : fours) {
            row = first;
            first = step(first, 4 * bytes);
        }
    }
    const uint8_t* operator()(int r) const { return fours[r / 4] + r % 4 * stride; }
};

}  // namespace slimrt::cpu::SLIMRT_ISA

#include SLIMRT_DOT
