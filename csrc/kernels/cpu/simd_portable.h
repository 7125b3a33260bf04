// simd.h for any machine: vectors of four floats by the compiler's vector extension (SSE2, NEON, ...).
#pragma once

namespace slimrt::cpu::SLIMRT_ISA {

typedef float Floats __attribute__((vector_size(16)));
typedef uint32_t Bits __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));

struct Vec {
    Floats v;
};
constexpr int lanes = 4, registers = 16, vectors_at_once = 1;
constexpr bool loads_groups = false;

static inline Floats as_floats(Bits a) { return reinterpret_cast<Floats>(a); }
static inline Bits as_bits(Floats a) { return reinterpret_cast<Bits>(a); }
static inline Bits load_u16(const void* p) {
    uint16_t x[4];
    memcpy(x, p, sizeof x);
    return Bits{x[0], x[1], x[2], x[3]};
}

static inline Vec load(const float* p) {
    Vec a;
    memcpy(&a.v, p, sizeof a.v);
    return a;
}
/// f16 to f32: a multiplication moves the exponent from bias 15 to 127 and makes subnormals right; infinities
/// and NaN get the largest exponent.
static inline Vec from_half(Bits half) {
    const Bits magnitude = half & 0x7fff, special = (magnitude >= 0x7c00) & 0x7f800000u;
    const Bits scaled = as_bits(as_floats(magnitude << 13) * 0x1p112f);
    return {as_floats(scaled | special | (half & 0x8000) << 16)};
}
static inline Vec load(const Half* p) { return from_half(load_u16(p)); }
static inline Vec load(const BFloat16* p) { return {as_floats(load_u16(p) << 16)}; }
static inline Bits load_u8(const void* p) {
    uint8_t x[4];
    memcpy(x, p, sizeof x);
    return Bits{x[0], x[1], x[2], x[3]};
}
static inline Vec load(const Int8* p) {
    return {__builtin_convertvector(Ints{p[0].code, p[1].code, p[2].code, p[3].code}, Floats)};
}
static inline Vec load(const E4M3* p) {
    const Bits code = load_u8(p);
    return from_half((code & 0x7f) << 7 | (code & 0x80) << 8);
}
static inline Vec load(const E5M2* p) { return from_half(load_u8(p) << 8); }
static inline Vec load_codes(FewBits<2>, const uint8_t* row, int64_t column) {
    const uint32_t word = row[column / 4];
    return {__builtin_convertvector(Bits{word, word >> 2, word >> 4, word >> 6} & 3, Floats)};
}
static inline Vec load_codes(FewBits<3>, const uint8_t* row, int64_t column) {
    uint8_t x[2];
    memcpy(x, row + column * 3 / 8, sizeof x);
    const uint32_t word = static_cast<uint32_t>(x[0] | x[1] << 8) >> (column & 4);
    return {__builtin_convertvector(Bits{word, word >> 3, word >> 6, word >> 9} & 7, Floats)};
}
static inline Vec load_codes(FewBits<4>, const uint8_t* row, int64_t column) {
    const Bits bytes = load_u8(row + column / 32 * 16 + column % 16);
    return {__builtin_convertvector(bytes >> static_cast<uint32_t>(column >> 2 & 4) & 15, Floats)};
}
constexpr bool integer_scores = false;  // see AVX-512
constexpr bool integer_channels = false;

/// As in simd_avx512.h, but products are of floats.
struct RowCodes {
    Floats v;
};
struct RowSums {
    Floats v;
};
using WeightCode = float;
constexpr int rows_per_lane = 1, absorbed_vectors = 2, max_weight = 1, weight_zero_point = 0;
static inline RowSums zero_sums(RowCodes) { return {Floats{}}; }
static inline RowCodes splat_quad(RowCodes, const void* p) {
    float weight;
    memcpy(&weight, p, sizeof weight);
    return {Floats{weight, weight, weight, weight}};
}
static inline RowSums add_products(RowSums sums, RowCodes weights, RowCodes codes) {
    return {sums.v + weights.v * codes.v};
}
template <class Rows>
static inline void transpose_rows(const Rows& rows, RowCodes* to) {
    for (int i = 0; i < 2; ++i) to[i].v = load(rows.row(0) + i * lanes).v;
}
static inline Vec to_floats(RowSums a) { return {a.v}; }

struct Int16s {
    Floats low, high;
};
static inline Int16s load_int16(const int16_t* p) {
    const auto four = [](const int16_t* x) {
        return __builtin_convertvector(Ints{x[0], x[1], x[2], x[3]}, Floats);
    };
    return {four(p), four(p + 4)};
}
static inline Int16s splat_int16(int16_t x) {
    const float a = x;
    return {Floats{a, a, a, a}, Floats{a, a, a, a}};
}
static inline Int16s mul_q15(Int16s a, Int16s b) {
    return {a.low * b.low * 0x1p-15f, a.high * b.high * 0x1p-15f};
}
static inline void store_weights(WeightCode* to, Int16s a, Int16s b) {
    memcpy(to, &a, sizeof a);
    memcpy(to + 2 * lanes, &b, sizeof b);
}
static inline Int16s rotate_q15(Int16s a, Int16s b, Int16s c, Int16s d) {
    constexpr float unit = 0x1p-15f;
    return {(a.low * b.low + c.low * d.low) * unit, (a.high * b.high + c.high * d.high) * unit};
}
static inline RowSums add_int16_products(RowSums sums, const Int8* codes, Int16s factors) {
    return {sums.v + load(codes).v * factors.low + load(codes + lanes).v * factors.high};
}

struct RowPairs {
    static constexpr bool fast = false;  // see AVX-512
};

static inline Vec load_part(const float* p, int64_t n) {
    Vec a = {};
    memcpy(&a.v, p, n * sizeof(float));
    return a;
}
static inline void store(float* p, Vec a) { memcpy(p, &a.v, sizeof a.v); }
static inline void store_part(float* p, Vec a, int64_t n) { memcpy(p, &a.v, n * sizeof(float)); }
static inline Vec splat(float x) { return {Floats{x, x, x, x}}; }

static inline Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
static inline Vec operator-(Vec a, Vec b) { return {a.v - b.v}; }
static inline Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
static inline Vec operator/(Vec a, Vec b) { return {a.v / b.v}; }
/// a * b + c
static inline Vec fma(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }
/// min and max return b where either is NaN.
static inline Vec min(Vec a, Vec b) { return {a.v < b.v ? a.v : b.v}; }
static inline Vec max(Vec a, Vec b) { return {a.v > b.v ? a.v : b.v}; }
/// a where it is less than b, else 0.
static inline Vec below(Vec a, Vec b) { return {a.v < b.v ? a.v : Floats{}}; }
/// Bit i: whether element i of a is above that of b.
static inline uint32_t above(Vec a, Vec b) {
    const Ints all = (a.v > b.v) & Ints{1, 2, 4, 8};
    return static_cast<uint32_t>(all[0] | all[1] | all[2] | all[3]);
}
static inline float sum(Vec a) { return (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]); }
static inline float max_of(Vec a) {
    const Vec halves = max(a, Vec{__builtin_shufflevector(a.v, a.v, 2, 3, 2, 3)});
    return halves.v[0] > halves.v[1] ? halves.v[0] : halves.v[1];
}

/// Horizontal sums: element i is the sum of the elements of a[i], for `lanes` vectors.
static inline Vec sums(const Vec* a) {
    const auto pairs = [](Floats x, Floats y) {
        return __builtin_shufflevector(x, y, 0, 4, 1, 5) + __builtin_shufflevector(x, y, 2, 6, 3, 7);
    };
    const Floats low = pairs(a[0].v, a[1].v), high = pairs(a[2].v, a[3].v);
    return {__builtin_shufflevector(low, high, 0, 1, 4, 5) + __builtin_shufflevector(low, high, 2, 3, 6, 7)};
}

/// Transposes a square of `lanes` vectors.
static inline void transpose(Vec* a) {
    const Floats low0 = __builtin_shufflevector(a[0].v, a[1].v, 0, 4, 1, 5);
    const Floats low1 = __builtin_shufflevector(a[2].v, a[3].v, 0, 4, 1, 5);
    const Floats high0 = __builtin_shufflevector(a[0].v, a[1].v, 2, 6, 3, 7);
    const Floats high1 = __builtin_shufflevector(a[2].v, a[3].v, 2, 6, 3, 7);
    a[0].v = __builtin_shufflevector(low0, low1, 0, 1, 4, 5);
    a[1].v = __builtin_shufflevector(low0, low1, 2, 3, 6, 7);
    a[2].v = __builtin_shufflevector(high0, high1, 0, 1, 4, 5);
    a[3].v = __builtin_shufflevector(high0, high1, 2, 3, 6, 7);
}

/// Adding 1.5 * 2^23 rounds to an integer; for |a| < 2^22.
static inline Vec round_even(Vec a) {
    const Vec magic = splat(0x1.8p23f);
    return a + magic - magic;
}
static inline void store_int16(int16_t* p, Vec a, Vec b) {
    for (int i = 0; i < lanes; ++i) {
        p[i] = static_cast<int16_t>(round_even(a).v[i]);
        p[lanes + i] = static_cast<int16_t>(round_even(b).v[i]);
    }
}
/// a * 2^n for integers n in [-160, 160]: in two steps, so that neither power leaves the range of exponents.
static inline Vec scale_by_power(Vec a, Vec n) {
    const Ints whole = __builtin_convertvector(n.v, Ints), half = whole >> 1;
    const auto power = [](Ints e) { return as_floats((reinterpret_cast<Bits>(e) + 127) << 23); };
    return {a.v * power(half) * power(whole - half)};
}

/// a0 a0 a2 a2 ..., a1 a1 a3 a3 ..., a1 a0 a3 a2 ...
static inline Vec duplicate_even(Vec a) { return {__builtin_shufflevector(a.v, a.v, 0, 0, 2, 2)}; }
static inline Vec duplicate_odd(Vec a) { return {__builtin_shufflevector(a.v, a.v, 1, 1, 3, 3)}; }
static inline Vec swap_pairs(Vec a) { return {__builtin_shufflevector(a.v, a.v, 1, 0, 3, 2)}; }
/// The even and the odd elements of the concatenation of a and b.
static inline void deinterleave(Vec a, Vec b, Vec* even, Vec* odd) {
    even->v = __builtin_shufflevector(a.v, b.v, 0, 2, 4, 6);
    odd->v = __builtin_shufflevector(a.v, b.v, 1, 3, 5, 7);
}

}  // namespace slimrt::cpu::SLIMRT_ISA
