// Products of int8 codes, for the units compiled once per ISA. SLIMRT_DOT names the header that has, for one
// instruction set:
//
// half_to_float(bits), store(Half*, Vec).
//
// Codes: 64 codes of 8 bits, of weights (unsigned) or activations (signed).
// - load_codes(p): 64 bytes; load_halves(p, q): 32 and 32; load_twice(p): 32 and the same again.
// - load_nibbles(p, q): the low nibbles of 16 bytes, their high ones, and the same of q.
// - fields(c, s, t, mask): c >> s & mask in the first half, c >> t & mask in the second.
// - above(c, d): c + 16 d.
// - look_up(table, c): number c of the 16 codes of load_table(p), which are Words.
//
// Sums: of products, in the order of the codes; Acc: a float for each of them, with fma and sum.
// - dot<wide>(start, w, x): w below 64 or, when wide, from wide(c), c signed, which adds wide_offset.
// - start_halves(p), start_quarters(p): 2 or 4 integers, each in one sum of its half or quarter, others
//   sum_bias; zero_sums(): all of them sum_bias, which to_acc and to_vec take away. Their types may differ.
// - to_acc(sums); if joins_steps, of halves: to_acc(sums, next), of 64 codes and the 64 after them.
// - dot_rows: how many rows to multiply side by side.
//
// Scales: 16 floats, with * and store; unit_blocks blocks of 32 are multiplied at a time.
// - Of activations: load_blocks(p): unit_blocks floats; load_eight(p, q), load_each_twice(p).
// - Of weights: blocks_apart(p, stride): unit_blocks 16-bit floats, as many bytes apart;
//   powers_apart(p, stride): as many powers of two, see power_bits; sixteen_scales(p, d): d times 16 int8;
//   eight_signed(bytes, d): d times 8 int8, then anything.
// - eight_scales(p): 8 scales and 8 minima from the first 16 bytes of Q4_K and Q5_K.
// - spread_halves(s, j): s[2j] for the sums' first half, s[2j + 1] for the second (if joins_steps, those of
//   an odd j and of j - 1); spread_quarters: from 4j.
// - add_last_eight(acc, s): s[8 ... 15] added to any of acc's.
//
// PanelCodes: 4 codes in each of `lanes` lanes; PanelSums: a sum in each. See linear_panel.h.
// - load_panel(p); splat_quad_codes(p): the same 4 codes in all; splat_sum(p): the same integer; dot<wide>;
// to_vec.
// - panel_vectors: of a register tile. few_in_registers: whether there are registers for linear_few.h.
// - PanelPairs: sums of products of codes that are not wide, two to a sum, of at most `max` (0: there are
//   none): of(w, x), plus(w, x), added_to(sums). To add in 16 bits first takes fewer instructions.
//
// Words: four bytes of each of `lanes` rows, see linear_unpack.h.
// - load_words(rows, at, to[4]), perhaps to[8]: those from byte `at` of the rows on; load_word(rows, at).
// - field(w, shift, mask): each byte >> shift & mask; above(w, v): w + 16 v; wide_words(w): as wide();
//   lowered(w, by): each byte less that, if panels are signed.
// - look_up(table, w): as of Codes. power_of(w): byte 0 of each row as a power of two.
// - byte_of(w, i), signed_byte_of(w, i): byte i of each row as a float; half_of(w, i): as a 16-bit float.
// - store_words(p, w).
//
// ByElement: products with an element of a vector of activations, n at a time; 1: there are none, and of what
// follows only side_by_side and tokens, and dot_quad<wide>(sums, words, p): with the 4 codes at p.
// - Floats: n activations; load(p); fma(w, x, i, sums): with the i-th.
// - side_by_side: codes of a row that are next to one another in a panel, where they are signed.
// - tokens: whose sums are in a vector. If these are not 4 and 1, store_words(p, first, second), of words
//   that follow one another, and store_scales(rows, p) are here; of_token(sums, next, t) undoes that order.
// - Codes: n fours of the codes of `tokens` tokens; load(p, next): the second one's are `next` bytes further;
//   start(): sum_bias in all sums; dot<wide>(sums, w, x, i): with the i-th side_by_side of them.
//   load_tokens(p, next): a float of each token.
// - of_words(w): PanelCodes; computed(v) keeps the compiler from computing v later.
//
// Int16Products: products of 16-bit integers, see linear_int16.h; min_tokens 0: they would not be faster.
#pragma once

#include "kernels/cpu/simd.h"

namespace slimrt::cpu::SLIMRT_ISA {

/// p + bytes, where the compiler is not to keep a table of such addresses.
static inline const uint8_t* step(const uint8_t* p, size_t bytes) {
    p += bytes;
    asm("" : "+r"(p));
    return p;
}

/// The bits of 2^(e - 128): the larger of two integers, the second for 0 and 1, where it is subnormal.
static constexpr uint32_t power_bits(uint8_t e) {
    const int32_t normal = (e - 1) * (1 << 23), subnormal = (e + 1) << 21;
    return static_cast<uint32_t>(normal > subnormal ? normal : subnormal);
}

/// All of them: to compute one takes longer than to multiply what it belongs to.
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

/// Where `lanes` rows are, some bytes apart.
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
