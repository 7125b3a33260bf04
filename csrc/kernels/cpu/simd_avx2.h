// simd.h for AVX2 with FMA and F16C.
#pragma once

#include <immintrin.h>

namespace slimrt::cpu::SLIMRT_ISA {

struct Vec {
    __m256 v;
};
constexpr int lanes = 8, registers = 16, vectors_at_once = 1;
constexpr bool loads_groups = false;

static inline __m256i first(int64_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

static inline Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
static inline Vec load(const Half* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
static inline Vec load(const BFloat16* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
}
static inline __m128i load_bytes(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
static inline Vec load(const Int8* p) { return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_bytes(p)))}; }
static inline Vec load(const E4M3* p) {
    const __m128i shifted = _mm_slli_epi16(_mm_cvtepi8_epi16(load_bytes(p)), 7);
    return {_mm256_cvtph_ps(_mm_and_si128(shifted, _mm_set1_epi16(short(0xbf80))))};
}
static inline Vec load(const E5M2* p) {
    return {_mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(load_bytes(p)), 8))};
}
static inline Vec load_codes(FewBits<2>, const uint8_t* row, int64_t column) {
    const __m256i places = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14);
    // Looked up by the lowest two bits of each lane.
    const __m256 codes = _mm256_setr_ps(0, 1, 2, 3, 0, 1, 2, 3);
    uint16_t word;
    memcpy(&word, row + column / 4, sizeof word);
    return {_mm256_permutevar_ps(codes, _mm256_srlv_epi32(_mm256_set1_epi32(word), places))};
}
static inline Vec load_codes(FewBits<3>, const uint8_t* row, int64_t column) {
    const __m256i places = _mm256_setr_epi32(0, 3, 6, 9, 12, 15, 18, 21);
    const __m256 codes = _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7);  // looked up by the lowest three bits
    // In bytes: the word of the last columns must not reach past the group.
    const int64_t back = (column >> 3 & 3) == 3;
    uint32_t word;
    memcpy(&word, row + column / 8 * 3 - back, sizeof word);
    const __m256i all = _mm256_set1_epi32(static_cast<int>(word >> 8 * back));
    return {_mm256_permutevar8x32_ps(codes, _mm256_srlv_epi32(all, places))};
}
static inline Vec load_codes(FewBits<4>, const uint8_t* row, int64_t column) {
    const __m256i bytes = _mm256_cvtepu8_epi32(load_bytes(row + column / 32 * 16 + column % 16));
    const __m256i low = _mm256_srl_epi32(bytes, _mm_cvtsi32_si128(static_cast<int>(column >> 2 & 4)));
    return {_mm256_cvtepi32_ps(_mm256_and_si256(low, _mm256_set1_epi32(15)))};
}
constexpr bool integer_scores = false;  // see AVX-512
constexpr bool integer_channels = false;

/// As in simd_avx512.h. Without VNNI two byte products are added in 16 bits with saturation, so weights would
/// have only 7 bits, an error comparable to that of q8 rows (0.8 of it) for 0.86 of the time: weights have 15
/// bits, and rows_per_lane is 2.
struct RowCodes {
    __m256i v;
};
struct RowSums {
    __m256i v;
};
using WeightCode = int16_t;
constexpr int rows_per_lane = 2, absorbed_vectors = 2, max_weight = 32767, weight_zero_point = 0;
static inline RowSums zero_sums(RowCodes) { return {_mm256_setzero_si256()}; }
static inline RowCodes splat_quad(RowCodes, const void* p) {
    int32_t four;
    memcpy(&four, p, sizeof four);
    return {_mm256_set1_epi32(four)};
}
/// sums + products of pairs of int16. Inline assembly: around the intrinsic g++ 12 copies the sums.
static inline RowSums add_pairs(RowSums sums, __m256i a, __m256i b) {
    asm("vpaddd %1, %0, %0" : "+x"(sums.v) : "x"(_mm256_madd_epi16(a, b)));
    return sums;
}
static inline RowSums add_products(RowSums sums, RowCodes weights, RowCodes codes) {
    return add_pairs(sums, weights.v, codes.v);
}
static inline __m256i load_as_int16(const Int8* p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
/// Transposes 16 columns of two rows to pairs of one column, as int16.
template <class Rows>
static inline void transpose_rows(const Rows& rows, RowCodes* to) {
    const __m256i a = load_as_int16(rows.row(0)), b = load_as_int16(rows.row(1));
    const __m256i low = _mm256_unpacklo_epi16(a, b), high = _mm256_unpackhi_epi16(a, b);
    to[0].v = _mm256_permute2x128_si256(low, high, 0x20);
    to[1].v = _mm256_permute2x128_si256(low, high, 0x31);
}
static inline Vec to_floats(RowSums a) { return {_mm256_cvtepi32_ps(a.v)}; }

struct Int16s {
    __m256i v;
};
static inline Int16s load_int16(const int16_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))};
}
static inline void store_int16(int16_t* p, Vec a, Vec b) {
    const __m256i mixed = _mm256_packs_epi32(_mm256_cvtps_epi32(a.v), _mm256_cvtps_epi32(b.v));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(mixed, 0xd8));
}
static inline Int16s splat_int16(int16_t x) { return {_mm256_set1_epi16(x)}; }
static inline Int16s mul_q15(Int16s a, Int16s b) { return {_mm256_mulhrs_epi16(a.v, b.v)}; }
static inline void store_weights(WeightCode* to, Int16s a, Int16s b) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), a.v);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 2 * lanes), b.v);
}
static inline Int16s rotate_q15(Int16s a, Int16s b, Int16s c, Int16s d) {
    return {_mm256_add_epi16(_mm256_mulhrs_epi16(a.v, b.v), _mm256_mulhrs_epi16(c.v, d.v))};
}
static inline RowSums add_int16_products(RowSums sums, const Int8* codes, Int16s factors) {
    return add_pairs(sums, load_as_int16(codes), factors.v);
}

/// See AVX-512.
struct RowPairs {
    static constexpr bool fast = true;
    __m256i v;

    static RowPairs of(Vec first, Vec second, Vec factor) {
        const __m256 whole = _mm256_set1_ps(0x1.8p23f);
        const __m256i low = _mm256_castps_si256(_mm256_fmadd_ps(first.v, factor.v, whole));
        const __m256i high = _mm256_castps_si256(_mm256_fmadd_ps(second.v, factor.v, whole));
        return {_mm256_blend_epi16(low, _mm256_slli_epi32(high, 16), 0xaa)};
    }
    static RowPairs splat(const int16_t* p) { return {splat_quad(RowCodes{}, p).v}; }
    static RowSums add_products(RowSums sums, RowPairs weights, RowPairs codes) {
        return add_pairs(sums, weights.v, codes.v);
    }
};

static inline Vec load_part(const float* p, int64_t n) { return {_mm256_maskload_ps(p, first(n))}; }
static inline void store(float* p, Vec a) { _mm256_storeu_ps(p, a.v); }
static inline void store_part(float* p, Vec a, int64_t n) { _mm256_maskstore_ps(p, first(n), a.v); }
static inline Vec splat(float x) { return {_mm256_set1_ps(x)}; }

static inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
static inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
static inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
static inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
/// a * b + c
static inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
/// min and max return b where either is NaN.
static inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
static inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
/// a where it is less than b, else 0.
static inline Vec below(Vec a, Vec b) { return {_mm256_and_ps(_mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ), a.v)}; }
/// Bit i: whether element i of a is above that of b.
static inline uint32_t above(Vec a, Vec b) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_GT_OQ)));
}
static inline float sum(Vec a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
static inline float max_of(Vec a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

/// Horizontal sums: element i is the sum of the elements of a[i], for `lanes` vectors.
static inline Vec sums(const Vec* a) {
    const auto quads = [](const Vec* x) {
        return _mm256_hadd_ps(_mm256_hadd_ps(x[0].v, x[1].v), _mm256_hadd_ps(x[2].v, x[3].v));
    };
    const __m256 low = quads(a), high = quads(a + 4);
    return {_mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31))};
}

/// Transposes a square of `lanes` vectors: pairs, then fours, then halves.
static inline void transpose(Vec* a) {
    __m256 fours[8];
    for (int i = 0; i < 8; i += 4) {
        const auto low = [&](int k) { return _mm256_castps_pd(_mm256_unpacklo_ps(a[k].v, a[k + 1].v)); };
        const auto high = [&](int k) { return _mm256_castps_pd(_mm256_unpackhi_ps(a[k].v, a[k + 1].v)); };
        fours[i + 0] = _mm256_castpd_ps(_mm256_unpacklo_pd(low(i), low(i + 2)));
        fours[i + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(low(i), low(i + 2)));
        fours[i + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(high(i), high(i + 2)));
        fours[i + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(high(i), high(i + 2)));
    }
    for (int i = 0; i < 4; ++i) {
        a[i].v = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20);
        a[i + 4].v = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31);
    }
}

static inline Vec round_even(Vec a) {
    return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
/// a * 2^n for integers n in [-160, 160]: in two steps, so that neither power leaves the range of exponents.
static inline Vec scale_by_power(Vec a, Vec n) {
    const auto power = [](__m256i e) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(e, _mm256_set1_epi32(127)), 23));
    };
    const __m256i whole = _mm256_cvtps_epi32(n.v), half = _mm256_srai_epi32(whole, 1);
    return {_mm256_mul_ps(_mm256_mul_ps(a.v, power(half)), power(_mm256_sub_epi32(whole, half)))};
}

/// a0 a0 a2 a2 ..., a1 a1 a3 a3 ..., a1 a0 a3 a2 ...
static inline Vec duplicate_even(Vec a) { return {_mm256_moveldup_ps(a.v)}; }
static inline Vec duplicate_odd(Vec a) { return {_mm256_movehdup_ps(a.v)}; }
static inline Vec swap_pairs(Vec a) { return {_mm256_permute_ps(a.v, 0xb1)}; }
/// The even and the odd elements of the concatenation of a and b.
static inline void deinterleave(Vec a, Vec b, Vec* even, Vec* odd) {
    const auto in_order = [](__m256 x) {
        return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(x), 0xd8));
    };
    even->v = in_order(_mm256_shuffle_ps(a.v, b.v, 0x88));
    odd->v = in_order(_mm256_shuffle_ps(a.v, b.v, 0xdd));
}

}  // namespace slimrt::cpu::SLIMRT_ISA
