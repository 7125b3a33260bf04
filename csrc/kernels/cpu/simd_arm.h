// What simd_neon.h and simd_neon_dot.h share: everything but the products of bytes, add_dot() and
// add_quad_dots().
#pragma once

namespace slimrt::cpu::SLIMRT_ISA {

struct Vec {
    float32x4_t v;
};
constexpr int lanes = 4, registers = 32, vectors_at_once = 2;
constexpr bool loads_groups = true;

/// An unaligned load of a vector or a number.
template <class To>
static inline To load_as(const void* p) {
    To a;
    memcpy(&a, p, sizeof a);
    return a;
}
static inline uint8x8_t read_four_bytes(const void* p) { return vcreate_u8(load_as<uint32_t>(p)); }

/// Integers of magnitude below 2^22 to floats: added to the bits of 1.5 * 2^23 they are in the low bits of
/// the mantissa, and subtracting 1.5 * 2^23 as a float leaves them. That is faster than a conversion, which
/// takes one pipe for two cycles on many cores.
constexpr float magic = 0x1.8p23f;
constexpr int32_t magic_bits = 0x4b400000;
static inline Vec without_magic(int32x4_t a) {
    return {vsubq_f32(vreinterpretq_f32_s32(a), vdupq_n_f32(magic))};
}
static inline Vec to_floats(int16x4_t a) { return without_magic(vaddw_s16(vdupq_n_s32(magic_bits), a)); }
static inline Vec to_floats(uint16x4_t a) {
    return without_magic(vreinterpretq_s32_u32(vaddw_u16(vdupq_n_u32(magic_bits), a)));
}

static inline Vec load(const float* p) { return {load_as<float32x4_t>(p)}; }
static inline Vec load(const Half* p) { return {vcvt_f32_f16(load_as<float16x4_t>(p))}; }
static inline Vec load(const BFloat16* p) {
    const uint16x8_t high = vcombine_u16(load_as<uint16x4_t>(p), vcreate_u16(0));
    return {vreinterpretq_f32_u16(vzip1q_u16(vdupq_n_u16(0), high))};
}
static inline void load_vectors(const Half* p, Vec (&to)[2]) {
    const float16x8_t both = load_as<float16x8_t>(p);
    to[0].v = vcvt_f32_f16(vget_low_f16(both));
    to[1].v = vcvt_high_f32_f16(both);
}
static inline void load_vectors(const BFloat16* p, Vec (&to)[2]) {
    const uint16x8_t both = load_as<uint16x8_t>(p), zero = vdupq_n_u16(0);
    to[0].v = vreinterpretq_f32_u16(vzip1q_u16(zero, both));
    to[1].v = vreinterpretq_f32_u16(vzip2q_u16(zero, both));
}
static inline Vec load(const Int8* p) {
    return to_floats(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(read_four_bytes(p)))));
}
static inline Vec load(const E4M3* p) {
    const int16x8_t shifted = vshll_n_s8(vreinterpret_s8_u8(read_four_bytes(p)), 7);
    const int16x4_t half = vand_s16(vget_low_s16(shifted), vdup_n_s16(static_cast<int16_t>(0xbf80)));
    return {vcvt_f32_f16(vreinterpret_f16_s16(half))};
}
static inline Vec load(const E5M2* p) {
    return {vcvt_f32_f16(vreinterpret_f16_u8(vzip1_u8(vdup_n_u8(0), read_four_bytes(p))))};
}
/// Converts 4 codes of `word` without shifting them: lane i keeps its bits at position i * bits, and its
/// exponent is chosen so that the lowest of them is worth 1.
template <int bits>
static inline Vec codes_in_place(uint32_t word) {
    constexpr int mask = (1 << bits) - 1, exponent = 127 + 23;
    const auto number = [](int i) {  // the lowest bit of lane i is worth 1
        return static_cast<uint32_t>(exponent - i * bits) << 23;
    };
    const uint32x4_t masks = {mask, mask << bits, mask << 2 * bits, mask << 3 * bits};
    const uint32x4_t zero = {number(0), number(1), number(2), number(3)};
    const uint32x4_t codes = vorrq_u32(vandq_u32(vdupq_n_u32(word), masks), zero);
    return {vsubq_f32(vreinterpretq_f32_u32(codes), vreinterpretq_f32_u32(zero))};
}
static inline Vec load_codes(FewBits<2>, const uint8_t* row, int64_t column) {
    return codes_in_place<2>(row[column / 4]);
}
static inline Vec load_codes(FewBits<3>, const uint8_t* row, int64_t column) {
    return codes_in_place<3>(static_cast<uint32_t>(load_as<uint16_t>(row + column * 3 / 8)) >> (column & 4));
}
static inline Vec load_codes(FewBits<4>, const uint8_t* row, int64_t column) {
    const uint32_t bytes = load_as<uint32_t>(row + column / 32 * 16 + column % 16);
    const uint32_t codes = bytes >> (column >> 2 & 4) & 0x0f0f0f0f;
    return to_floats(vget_low_u16(vmovl_u8(vcreate_u8(codes))));
}

/// The loads of all 32 codes of the group at p.
static inline void to_floats(uint16x8_t codes, Vec* to) {
    to[0] = to_floats(vget_low_u16(codes));
    to[1] = to_floats(vget_high_u16(codes));
}
static inline void to_floats(uint8x16_t codes, Vec* to) {
    to_floats(vmovl_u8(vget_low_u8(codes)), to);
    to_floats(vmovl_high_u8(codes), to + 2);
}
static inline uint8x16_t unpack_codes(uint8x16_t bytes, int first) {  // of 2 bits
    const uint8x16_t each = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
    const int8x16_t shifts = {0, -2, -4, -6, 0, -2, -4, -6, 0, -2, -4, -6, 0, -2, -4, -6};
    return vshlq_u8(vqtbl1q_u8(bytes, each + static_cast<uint8_t>(first)), shifts) & uint8_t{3};
}
static inline void load_group(FewBits<2>, const uint8_t* p, Vec (&to)[8]) {
    const uint8x16_t bytes = vcombine_u8(load_as<uint8x8_t>(p), vdup_n_u8(0));
    for (int i = 0; i < 2; ++i) to_floats(unpack_codes(bytes, 4 * i), to + 4 * i);
}
static inline void unpack_group(FewBits<3>, const uint8_t* p, uint16x8_t (&to)[4]) {
    const uint8x16_t bytes = vcombine_u8(load_as<uint8x8_t>(p), read_four_bytes(p + 8));
    // The two bytes that contain each code.
    const uint8x16_t first = {0, 1, 0, 1, 0, 1, 1, 2, 1, 2, 1, 2, 2, 3, 2, 3};
    const int16x8_t shifts = {0, -3, -6, -1, -4, -7, -2, -5};
    for (int i = 0; i < 4; ++i) {
        const uint8x16_t each = vqtbl1q_u8(bytes, first + static_cast<uint8_t>(3 * i));
        to[i] = vshlq_u16(vreinterpretq_u16_u8(each), shifts) & uint16_t{7};
    }
}
static inline void load_group(FewBits<3> few, const uint8_t* p, Vec (&to)[8]) {
    uint16x8_t codes[4];
    unpack_group(few, p, codes);
    for (int i = 0; i < 4; ++i) to_floats(codes[i], to + 2 * i);
}
static inline void load_group(FewBits<4>, const uint8_t* p, Vec (&to)[8]) {
    const uint8x16_t bytes = load_as<uint8x16_t>(p);
    to_floats(bytes & uint8_t{15}, to);
    to_floats(bytes >> uint8_t{4}, to + 4);
}

/// Integer dot products of Int8 rows: 16 codes times digits, both signed.
constexpr bool integer_scores = true;
constexpr bool integer_channels = true;
struct RowCodes {
    int8x16_t v;
};
struct RowSums {
    int32x4_t v;
};
/// The bias is 0, since both factors are signed.
static inline RowCodes load_biased(const Int8* p) { return {load_as<int8x16_t>(p)}; }
/// All 32 codes of a group.
static inline void unpack_group(FewBits<2>, const uint8_t* p, RowCodes (&to)[2]) {
    const uint8x16_t bytes = vcombine_u8(load_as<uint8x8_t>(p), vdup_n_u8(0));
    for (int i = 0; i < 2; ++i) to[i].v = vreinterpretq_s8_u8(unpack_codes(bytes, 4 * i));
}
static inline void unpack_group(FewBits<3> few, const uint8_t* p, RowCodes (&to)[2]) {
    uint16x8_t codes[4];
    unpack_group(few, p, codes);
    const auto narrow = [](uint16x8_t a, uint16x8_t b) {
        return vreinterpretq_s8_u8(vuzp1q_u8(vreinterpretq_u8_u16(a), vreinterpretq_u8_u16(b)));
    };
    for (int i = 0; i < 2; ++i) to[i].v = narrow(codes[2 * i], codes[2 * i + 1]);
}
static inline void unpack_group(FewBits<4>, const uint8_t* p, RowCodes (&to)[2]) {
    const uint8x16_t bytes = load_as<uint8x16_t>(p);
    to[0].v = vreinterpretq_s8_u8(bytes & uint8_t{15});
    to[1].v = vreinterpretq_s8_u8(bytes >> uint8_t{4});
}
/// The scale of a group, as the sums of its products have it.
static inline Vec group_scales(RowCodes, const float* scale) { return {vld1q_dup_f32(scale)}; }
static inline RowCodes load_biased_part(const Int8* p, int64_t n) {
    RowCodes codes = {vdupq_n_s8(0)};
    memcpy(&codes.v, p, static_cast<size_t>(n < 16 ? n : 16));
    return codes;
}
static inline RowSums zero_sums(RowCodes) { return {vdupq_n_s32(0)}; }
static inline RowSums load_sums(RowCodes codes, const int32_t*) { return zero_sums(codes); }
static inline RowSums add_dots(RowSums sums, RowCodes codes, const int8_t* digits) {
    return {add_dot(sums.v, codes.v, load_as<int8x16_t>(digits))};
}
static inline RowSums add_products(RowSums sums, RowCodes weights, RowCodes codes) {
    return {add_quad_dots(sums.v, weights.v, codes.v)};
}
static inline RowCodes splat_quad(RowCodes, const void* p) {
    return {vreinterpretq_s8_s32(vdupq_n_s32(load_as<int32_t>(p)))};
}
static inline int8x16_t load_sixteen(const Int8* p) { return load_as<int8x16_t>(p); }
static inline int8x16_t load_sixteen(Nibbles from) {
    const uint8x16_t bytes = load_as<uint8x16_t>(from.bytes);
    const uint8x16_t codes = from.shift ? vshrq_n_u8(bytes, 4) : vandq_u8(bytes, vdupq_n_u8(15));
    return vsubq_s8(vreinterpretq_s8_u8(codes), vdupq_n_s8(8));
}
/// Transposes 16 columns of four rows to quads of one column: to[j] has columns 4 j to 4 j + 3.
template <class Rows>
static inline void transpose_rows(const Rows& rows, RowCodes* to) {
    const auto at = [&](int i) { return load_sixteen(rows.row(i)); };
    const auto pairs = [](int8x16_t x) { return vreinterpretq_s16_s8(x); };
    const int8x16_t a = at(0), b = at(1), c = at(2), d = at(3);
    const int16x8_t low_ab = pairs(vzip1q_s8(a, b)), high_ab = pairs(vzip2q_s8(a, b));
    const int16x8_t low_cd = pairs(vzip1q_s8(c, d)), high_cd = pairs(vzip2q_s8(c, d));
    to[0].v = vreinterpretq_s8_s16(vzip1q_s16(low_ab, low_cd));
    to[1].v = vreinterpretq_s8_s16(vzip2q_s16(low_ab, low_cd));
    to[2].v = vreinterpretq_s8_s16(vzip1q_s16(high_ab, high_cd));
    to[3].v = vreinterpretq_s8_s16(vzip2q_s16(high_ab, high_cd));
}
/// 64 floats times a factor, rounded to integers of magnitude at most 127 * 128, as 128 high + low.
static inline void split_digits(const float* x, float factor, int8_t* high, int8_t* low) {
    for (int i = 0; i < 64; i += 16) {
        int16x8_t uppers[2], lowers[2];
        for (int j = 0; j < 2; ++j) {
            const auto whole = [&](int at) {  // in the low bits
                const float32x4_t scaled = vmulq_n_f32(vld1q_f32(x + i + at), factor);
                return vreinterpretq_s16_f32(vaddq_f32(scaled, vdupq_n_f32(magic)));
            };
            const int16x8_t code = vuzp1q_s16(whole(8 * j), whole(8 * j + 4));
            uppers[j] = vrshrq_n_s16(code, 7);
            lowers[j] = vsubq_s16(code, vshlq_n_s16(uppers[j], 7));
        }
        vst1q_s8(high + i, vuzp1q_s8(vreinterpretq_s8_s16(uppers[0]), vreinterpretq_s8_s16(uppers[1])));
        vst1q_s8(low + i, vuzp1q_s8(vreinterpretq_s8_s16(lowers[0]), vreinterpretq_s8_s16(lowers[1])));
    }
}
static inline RowSums operator-(RowSums a, RowSums b) { return {vsubq_s32(a.v, b.v)}; }
/// 128 a + b
static inline Vec join_digits(RowSums a, RowSums b) {
    return {vfmaq_n_f32(vcvtq_f32_s32(b.v), vcvtq_f32_s32(a.v), 128)};
}

/// As in simd_avx512.h. Both factors are signed: 8-bit weights are stored minus the zero point 128, and sums
/// start from 128 times the sums of the columns.
using WeightCode = int8_t;
constexpr int rows_per_lane = 4, absorbed_vectors = 4, max_weight = 255, weight_zero_point = 128;
static inline Vec to_floats(RowSums a) { return {vcvtq_f32_s32(a.v)}; }

struct Int16s {
    int16x8_t v;
};
static inline Int16s load_int16(const int16_t* p) { return {load_as<int16x8_t>(p)}; }
static inline void store_int16(int16_t* p, Vec a, Vec b) {
    const int16x8_t both = vcombine_s16(vmovn_s32(vcvtnq_s32_f32(a.v)), vmovn_s32(vcvtnq_s32_f32(b.v)));
    memcpy(p, &both, sizeof both);
}
static inline Int16s splat_int16(int16_t x) { return {vdupq_n_s16(x)}; }
static inline Int16s mul_q15(Int16s a, Int16s b) { return {vqrdmulhq_s16(a.v, b.v)}; }
static inline void store_weights(WeightCode* to, Int16s a, Int16s b) {
    const int16x8_t zero = vdupq_n_s16(weight_zero_point);
    const int8x16_t codes = vcombine_s8(vqmovn_s16(vsubq_s16(a.v, zero)), vqmovn_s16(vsubq_s16(b.v, zero)));
    memcpy(to, &codes, sizeof codes);
}
static inline Int16s rotate_q15(Int16s a, Int16s b, Int16s c, Int16s d) {
    return {vaddq_s16(vqrdmulhq_s16(a.v, b.v), vqrdmulhq_s16(c.v, d.v))};
}
static inline RowSums add_int16_products(RowSums sums, const Int8* codes, Int16s factors) {
    const int16x8_t wide = vmovl_s8(load_as<int8x8_t>(codes));
    const int32x4_t low = vmlal_s16(sums.v, vget_low_s16(wide), vget_low_s16(factors.v));
    return {vmlal_high_s16(low, wide, factors.v)};
}

struct RowPairs {
    static constexpr bool fast = false;  // see AVX-512
};

static inline Vec load_part(const float* p, int64_t n) {
    Vec a = {vdupq_n_f32(0)};
    memcpy(&a.v, p, static_cast<size_t>(n) * sizeof(float));
    return a;
}
static inline void store(float* p, Vec a) { memcpy(p, &a.v, sizeof a.v); }
static inline void store_part(float* p, Vec a, int64_t n) {
    memcpy(p, &a.v, static_cast<size_t>(n) * sizeof(float));
}
static inline Vec splat(float x) { return {vdupq_n_f32(x)}; }

static inline Vec operator+(Vec a, Vec b) { return {vaddq_f32(a.v, b.v)}; }
static inline Vec operator-(Vec a, Vec b) { return {vsubq_f32(a.v, b.v)}; }
static inline Vec operator*(Vec a, Vec b) { return {vmulq_f32(a.v, b.v)}; }
static inline Vec operator/(Vec a, Vec b) { return {vdivq_f32(a.v, b.v)}; }
/// a * b + c
static inline Vec fma(Vec a, Vec b, Vec c) { return {vfmaq_f32(c.v, a.v, b.v)}; }
/// min and max return b where either is NaN, which fmin and fmax do not.
static inline Vec min(Vec a, Vec b) { return {vbslq_f32(vcltq_f32(a.v, b.v), a.v, b.v)}; }
static inline Vec max(Vec a, Vec b) { return {vbslq_f32(vcgtq_f32(a.v, b.v), a.v, b.v)}; }
/// a where it is less than b, else 0.
static inline Vec below(Vec a, Vec b) {
    return {vreinterpretq_f32_u32(vandq_u32(vcltq_f32(a.v, b.v), vreinterpretq_u32_f32(a.v)))};
}
/// Bit i: whether element i of a is above that of b.
static inline uint32_t above(Vec a, Vec b) {
    return vaddvq_u32(vandq_u32(vcgtq_f32(a.v, b.v), uint32x4_t{1, 2, 4, 8}));
}
static inline float sum(Vec a) { return vaddvq_f32(a.v); }
static inline float max_of(Vec a) {
    const Vec halves = max(a, Vec{vextq_f32(a.v, a.v, 2)});
    const float x = vgetq_lane_f32(halves.v, 0), y = vgetq_lane_f32(halves.v, 1);
    return x > y ? x : y;
}

/// Horizontal sums: element i is the sum of the elements of a[i], for `lanes` vectors.
static inline Vec sums(const Vec* a) {
    return {vpaddq_f32(vpaddq_f32(a[0].v, a[1].v), vpaddq_f32(a[2].v, a[3].v))};
}

/// Transposes a square of `lanes` vectors: pairs, then halves.
static inline void transpose(Vec* a) {
    const auto pairs = [](float32x4_t x) { return vreinterpretq_f64_f32(x); };
    const float64x2_t even0 = pairs(vtrn1q_f32(a[0].v, a[1].v)), odd0 = pairs(vtrn2q_f32(a[0].v, a[1].v));
    const float64x2_t even1 = pairs(vtrn1q_f32(a[2].v, a[3].v)), odd1 = pairs(vtrn2q_f32(a[2].v, a[3].v));
    a[0].v = vreinterpretq_f32_f64(vtrn1q_f64(even0, even1));
    a[1].v = vreinterpretq_f32_f64(vtrn1q_f64(odd0, odd1));
    a[2].v = vreinterpretq_f32_f64(vtrn2q_f64(even0, even1));
    a[3].v = vreinterpretq_f32_f64(vtrn2q_f64(odd0, odd1));
}

/// Adding 1.5 * 2^23 rounds to an integer; for |a| < 2^22.
static inline Vec round_even(Vec a) { return a + splat(magic) - splat(magic); }
/// a * 2^n for integers n in [-160, 160]: in two steps, so that neither power leaves the range of exponents.
static inline Vec scale_by_power(Vec a, Vec n) {
    const auto power = [](int32x4_t e) {
        return Vec{vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(e, vdupq_n_s32(127)), 23))};
    };
    const int32x4_t whole = vcvtq_s32_f32(n.v), half = vshrq_n_s32(whole, 1);
    return a * power(half) * power(vsubq_s32(whole, half));
}

/// a0 a0 a2 a2 ..., a1 a1 a3 a3 ..., a1 a0 a3 a2 ...
static inline Vec duplicate_even(Vec a) { return {vtrn1q_f32(a.v, a.v)}; }
static inline Vec duplicate_odd(Vec a) { return {vtrn2q_f32(a.v, a.v)}; }
static inline Vec swap_pairs(Vec a) { return {vrev64q_f32(a.v)}; }
/// The even and the odd elements of the concatenation of a and b.
static inline void deinterleave(Vec a, Vec b, Vec* even, Vec* odd) {
    even->v = vuzp1q_f32(a.v, b.v);
    odd->v = vuzp2q_f32(a.v, b.v);
}

}  // namespace slimrt::cpu::SLIMRT_ISA
