// Vectors of float for the units compiled once per ISA. SLIMRT_SIMD names the header that defines for one
// instruction set:
//   Vec, lanes, registers, vectors_at_once; load, load_part, store, store_part, splat; + - * /, fma, min,
//   max, sum, max_of, sums, transpose, below, above; round_even, scale_by_power; duplicate_even,
//   duplicate_odd, swap_pairs, deinterleave; load_codes; loads_groups and, if it is true, load_group;
//   integer_scores; RowCodes, RowSums and Int16s (see simd_avx512.h); integer_channels: whether it pays to
//   quantise a query for each block of rows with scales per channel and, if it is true, split_digits,
//   unpack_group (see simd_arm.h).
// Everything below is made of these. All functions have internal linkage.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

namespace slimrt::cpu::SLIMRT_ISA {

struct Half {
    uint16_t bits;  // IEEE binary16
};
struct BFloat16 {
    uint16_t bits;  // bfloat16
};
struct Int8 {
    int8_t code;
};
/// OCP FP8. An E4M3 loads as 2^-8 times its value: its bits are read as f16, whose exponent bias is larger by
/// 8, and the scale makes up for it. No E4M3 here is NaN: a row with a NaN has it in its scale.
struct E4M3 {
    uint8_t bits;
};
struct E5M2 {
    uint8_t bits;
};
/// Consecutive 4-bit codes of a row, minus 8: the low nibbles of the bytes if shift is 0, the high nibbles if
/// it is 4.
struct Nibbles {
    const uint8_t* bytes;
    int shift;
    Nibbles operator+(int64_t n) const { return {bytes + n, shift}; }
};
/// Rows of 4-bit codes for transpose_rows(). Where that takes 32 columns it reads both nibbles, whatever
/// shift is.
struct FourBitRows {
    const uint8_t* data;
    int64_t stride;
    int shift;
    Nibbles row(int64_t i) const { return {data + i * stride, shift}; }
};
/// load_codes(FewBits<bits>(), row, column): `lanes` codes of 2, 3 or 4 bits (see few_bits.h) from a multiple
/// of `lanes` on, as floats; reads nothing outside their group of 32. load_group(FewBits<bits>(), p, to): all
/// 32 codes of a group.
template <int bits>
struct FewBits {};

}  // namespace slimrt::cpu::SLIMRT_ISA

#include SLIMRT_SIMD

namespace slimrt::cpu::SLIMRT_ISA {

/// The first n < lanes elements, then zeros.
template <class Stored>
static inline Vec load_part(const Stored* p, int64_t n) {
    Stored padded[lanes] = {};
    memcpy(padded, p, n * sizeof(Stored));
    return load(padded);
}

/// vectors_at_once vectors, which are best loaded together.
template <class Stored>
static inline void load_vectors(const Stored* p, Vec (&to)[vectors_at_once]) {
    for (int i = 0; i < vectors_at_once; ++i) to[i] = load(p + i * lanes);
}

/// e^x = 2^n (1 + r + r^2 p), Cephes' expf.
struct ExpParts {
    Vec n, r, p;
};
static inline ExpParts exp_parts(Vec x) {
    const Vec n = round_even(x * splat(1.44269504f));
    const Vec r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), x));
    Vec p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    return {n, r, p};
}

/// e^x to about one ulp; 0 below -104, NaN stays NaN.
static inline Vec exp(Vec x) {
    const auto [n, r, p] = exp_parts(min(splat(89.0f), max(splat(-105.0f), x)));
    return scale_by_power(fma(p, r * r, r + splat(1.0f)), n);
}

/// tanh x = m / (m + 2), m = e^2x - 1 = 2^n (r + r^2 p) + (2^n - 1), which loses nothing near 0.
static inline Vec tanh(Vec x) {
    const auto [n, r, p] = exp_parts(min(splat(20.0f), max(splat(-20.0f), x + x)));
    const Vec m = scale_by_power(fma(p, r * r, r), n) + (scale_by_power(splat(1.0f), n) - splat(1.0f));
    return m / (m + splat(2.0f));
}

/// 1 - erf(x) for x >= 0, with a relative error of about 1e-7 (of x^2 1e-7 for large x): W. Press et al.'s
/// Chebyshev fit.
static inline Vec erfc(Vec x) {
    const Vec t = splat(1.0f) / fma(splat(0.5f), x, splat(1.0f));
    Vec p = splat(0.17087277f);
    p = fma(p, t, splat(-0.82215223f));
    p = fma(p, t, splat(1.48851587f));
    p = fma(p, t, splat(-1.13520398f));
    p = fma(p, t, splat(0.27886807f));
    p = fma(p, t, splat(-0.18628806f));
    p = fma(p, t, splat(0.09678418f));
    p = fma(p, t, splat(0.37409196f));
    p = fma(p, t, splat(1.00002368f));
    p = fma(p, t, splat(-1.26551223f));
    return t * exp(p - x * x);
}

}  // namespace slimrt::cpu::SLIMRT_ISA
