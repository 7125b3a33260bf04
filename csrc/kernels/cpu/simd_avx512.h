// simd.h for AVX-512 (F, BW, DQ, VL).
#pragma once

#include <immintrin.h>

namespace slimrt::cpu::SLIMRT_ISA {

struct Vec {
    __m512 v;
};
constexpr int lanes = 16, registers = 32, vectors_at_once = 1;
constexpr bool loads_groups = false;

static inline __mmask16 first(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }

static inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline Vec load(const Half* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
static inline Vec load(const BFloat16* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
static inline __m128i load_bytes(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
static inline Vec load(const Int8* p) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_bytes(p)))}; }
static inline Vec load(const E4M3* p) {
    const __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load_bytes(p)), 7);
    return {_mm512_cvtph_ps(_mm256_and_si256(shifted, _mm256_set1_epi16(short(0xbf80))))};
}
static inline Vec load(const E5M2* p) {
    return {_mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(load_bytes(p)), 8))};
}
/// Codes to floats by a table lookup with the lowest 4 bits of each lane. The table repeats every n_codes
/// entries, so that the bits above need no mask.
static inline Vec codes_of(__m512i lowest, int n_codes) {
    const __m512i all = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512 table = _mm512_cvtepi32_ps(_mm512_and_si512(all, _mm512_set1_epi32(n_codes - 1)));
    return {_mm512_permutexvar_ps(lowest, table)};
}
static inline Vec load_codes(FewBits<2>, const uint8_t* row, int64_t column) {
    const __m512i places = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    int32_t word;
    memcpy(&word, row + column / 4, sizeof word);
    return codes_of(_mm512_srlv_epi32(_mm512_set1_epi32(word), places), 4);
}
static inline Vec load_codes(FewBits<3>, const uint8_t* row, int64_t column) {
    const __m256i places = _mm256_setr_epi32(0, 3, 6, 9, 12, 15, 18, 21);
    // In bytes: the word of the last columns must not reach past the group.
    const int64_t back = column >> 3 & 2;
    uint64_t word;
    memcpy(&word, row + column / 8 * 3 - back, sizeof word);
    word >>= 8 * back;
    const auto eight = [&](uint64_t w) {
        return _mm256_srlv_epi32(_mm256_set1_epi32(static_cast<int32_t>(w)), places);
    };
    return codes_of(_mm512_inserti64x4(_mm512_castsi256_si512(eight(word)), eight(word >> 24), 1), 8);
}
static inline Vec load_codes(FewBits<4>, const uint8_t* row, int64_t column) {
    const __m512i bytes = _mm512_cvtepu8_epi32(load_bytes(row + column / 32 * 16));
    const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(column >> 2 & 4));
    return codes_of(_mm512_srl_epi32(bytes, shift), 16);
}

/// Integer dot products of Int8 rows by vpdpbusd: 64 codes, biased by 128 to be unsigned, times signed digits
/// of the query.
constexpr bool integer_scores = true;
constexpr bool integer_channels = false;
struct RowCodes {
    __m512i v;
};
struct RowSums {
    __m512i v;
};
static inline RowCodes load_biased(const Int8* p) {
    return {_mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(-128))};
}
static inline RowCodes load_biased_part(const Int8* p, int64_t n) {
    const __m512i codes = _mm512_maskz_loadu_epi8(n < 64 ? (1ull << n) - 1 : ~0ull, p);
    return {_mm512_xor_si512(codes, _mm512_set1_epi8(-128))};
}
static inline RowSums zero_sums(RowCodes) { return {_mm512_setzero_si512()}; }
static inline RowSums load_sums(RowCodes, const int32_t* p) { return {_mm512_loadu_si512(p)}; }
static inline RowSums add_dots(RowSums sums, RowCodes codes, const int8_t* digits) {
    // Inline assembly: around the intrinsic g++ 12 copies the sums to another register and back.
    asm("vpdpbusd %2, %1, %0"
        : "+v"(sums.v)
        : "v"(codes.v), "m"(*reinterpret_cast<const __m512i_u*>(digits)));
    return sums;
}
static inline RowSums add_products(RowSums sums, RowCodes weights, RowCodes codes) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sums.v) : "v"(weights.v), "v"(codes.v));
    return sums;
}
static inline RowSums splat_sums(RowCodes, int32_t sum) { return {_mm512_set1_epi32(sum)}; }
static inline RowCodes splat_quad(RowCodes, const void* p) {
    int32_t four;
    memcpy(&four, p, sizeof four);
    return {_mm512_set1_epi32(four)};
}
/// Transposes 64 columns of four rows to quads of one column: to[j] has columns 16 j to 16 j + 15.
template <class Rows>
static inline void transpose_rows(const Rows& rows, RowCodes* to) {
    // Lane l (128 bits) of a row gets columns 4 l ... 4 l + 3 of each 16, so that unpacking within lanes
    // leaves the columns in order.
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const auto at = [&](int i) { return _mm512_permutexvar_epi32(order, _mm512_loadu_si512(rows.row(i))); };
    const __m512i a = at(0), b = at(1), c = at(2), d = at(3);
    const __m512i low_ab = _mm512_unpacklo_epi8(a, b), high_ab = _mm512_unpackhi_epi8(a, b);
    const __m512i low_cd = _mm512_unpacklo_epi8(c, d), high_cd = _mm512_unpackhi_epi8(c, d);
    to[0].v = _mm512_unpacklo_epi16(low_ab, low_cd);
    to[1].v = _mm512_unpackhi_epi16(low_ab, low_cd);
    to[2].v = _mm512_unpacklo_epi16(high_ab, high_cd);
    to[3].v = _mm512_unpackhi_epi16(high_ab, high_cd);
}
/// The same for 32 columns of four rows of 4-bit codes.
static inline void transpose_rows(const FourBitRows& rows, RowCodes* to) {
    const auto at = [&](int i) { return load_bytes(rows.row(i).bytes); };
    __m512i all = _mm512_castsi128_si512(at(0));
    all = _mm512_inserti32x4(all, at(1), 1);
    all = _mm512_inserti32x4(all, at(2), 2);
    all = _mm512_inserti32x4(all, at(3), 3);
    // Lane l gets columns 4 l ... 4 l + 3 of all rows; then the rows of a column are made adjacent.
    const __m512i quarters = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i columns =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    all = _mm512_shuffle_epi8(_mm512_permutexvar_epi32(quarters, all), columns);
    const __m512i low = _mm512_set1_epi8(15), eight = _mm512_set1_epi8(8);
    to[0].v = _mm512_sub_epi8(_mm512_and_si512(all, low), eight);
    to[1].v = _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi16(all, 4), low), eight);
}
/// 64 4-bit codes, which are two groups.
static inline void unpack_group(FewBits<4>, const uint8_t* p, RowCodes (&to)[1]) {
    const __m512i twice = _mm512_permutexvar_epi64(
        _mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3),
        _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
    const __m512i codes = _mm512_srlv_epi64(twice, _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4));
    to[0].v = _mm512_and_si512(codes, _mm512_set1_epi8(15));
}
/// The scales of these groups, as the sums of their products have them.
static inline Vec group_scales(RowCodes, const float* scales) {
    return {_mm512_mask_broadcastss_ps(_mm512_set1_ps(scales[0]), 0xff00, _mm_load_ss(scales + 1))};
}
static inline RowSums operator-(RowSums a, RowSums b) { return {_mm512_sub_epi32(a.v, b.v)}; }
/// 128 a + b
static inline Vec join_digits(RowSums a, RowSums b) {
    return {_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(a.v, 7), b.v))};
}

/// Products of absorbed rows with softmax weights: a lane has rows_per_lane rows of one column, times as many
/// weights, which are integers from -weight_zero_point to max_weight - weight_zero_point.
using WeightCode = uint8_t;
constexpr int rows_per_lane = 4, absorbed_vectors = 4, max_weight = 255, weight_zero_point = 0;
static inline Vec to_floats(RowSums a) { return {_mm512_cvtepi32_ps(a.v)}; }

/// 2 * lanes int16, often fractions in Q15 (32767 stands for nearly 1).
struct Int16s {
    __m512i v;
};
static inline Int16s load_int16(const int16_t* p) { return {_mm512_loadu_si512(p)}; }
static inline void store_int16(int16_t* p, Vec a, Vec b) {
    const __m512i mixed = _mm512_packs_epi32(_mm512_cvtps_epi32(a.v), _mm512_cvtps_epi32(b.v));
    _mm512_storeu_si512(p, _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), mixed));
}
/// Q15 product: a b / 2^15, rounded.
static inline Int16s mul_q15(Int16s a, Int16s b) { return {_mm512_mulhrs_epi16(a.v, b.v)}; }
/// Q15 rotation: (a b + c d) / 2^15, each product rounded.
static inline Int16s rotate_q15(Int16s a, Int16s b, Int16s c, Int16s d) {
    return {_mm512_add_epi16(_mm512_mulhrs_epi16(a.v, b.v), _mm512_mulhrs_epi16(c.v, d.v))};
}
static inline Int16s splat_int16(int16_t x) { return {_mm512_set1_epi16(x)}; }
static inline void store_weights(WeightCode* to, Int16s a, Int16s b) {
    const __m512i mixed = _mm512_packus_epi16(a.v, b.v);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), mixed));
}
static inline RowSums add_int16_products(RowSums sums, const Int8* codes, Int16s factors) {
    const __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
    asm("vpdpwssd %2, %1, %0" : "+v"(sums.v) : "v"(wide), "v"(factors.v));
    return sums;
}

/// int16, two rows of a column adjacent. fast: whether their products are faster than those of floats.
struct RowPairs {
    static constexpr bool fast = true;
    __m512i v;

    /// first and second times factor, rounded to int16; the products fit.
    static RowPairs of(Vec first, Vec second, Vec factor) {
        // 1.5 * 2^23: the sum has the integer in its low bits.
        const __m512 whole = _mm512_set1_ps(0x1.8p23f);
        const __m512i low = _mm512_castps_si512(_mm512_fmadd_ps(first.v, factor.v, whole));
        const __m512i high = _mm512_castps_si512(_mm512_fmadd_ps(second.v, factor.v, whole));
        return {_mm512_mask_blend_epi16(0xaaaaaaaa, low, _mm512_slli_epi32(high, 16))};
    }
    static RowPairs splat(const int16_t* p) { return {splat_quad(RowCodes{}, p).v}; }
    static RowSums add_products(RowSums sums, RowPairs weights, RowPairs codes) {
        asm("vpdpwssd %2, %1, %0" : "+v"(sums.v) : "v"(codes.v), "v"(weights.v));
        return sums;
    }
};

static inline Vec load_part(const float* p, int64_t n) { return {_mm512_maskz_loadu_ps(first(n), p)}; }
static inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
static inline void store_part(float* p, Vec a, int64_t n) { _mm512_mask_storeu_ps(p, first(n), a.v); }
static inline Vec splat(float x) { return {_mm512_set1_ps(x)}; }

static inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
/// a * b + c
static inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
/// min and max return b where either is NaN.
static inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
static inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
/// a where it is less than b, else 0.
static inline Vec below(Vec a, Vec b) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), a.v)};
}
/// Bit i: whether element i of a is above that of b.
static inline uint32_t above(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ); }
static inline float sum(Vec a) { return _mm512_reduce_add_ps(a.v); }
static inline float max_of(Vec a) { return _mm512_reduce_max_ps(a.v); }

/// Horizontal sums: element i is the sum of the elements of a[i], for `lanes` vectors.
static inline Vec sums(const Vec* a) {
    const auto pairs = [](Vec x, Vec y) {
        return _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(x.v, y.v), _mm512_unpackhi_ps(x.v, y.v)));
    };
    const auto quads = [&](const Vec* x) {
        const __m512d low = pairs(x[0], x[1]), high = pairs(x[2], x[3]);
        return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
    };
    const auto halves = [](__m512 x, __m512 y) {
        return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
    };
    return {halves(halves(quads(a), quads(a + 4)), halves(quads(a + 8), quads(a + 12)))};
}

/// Transposes a square of `lanes` vectors: pairs, then fours, then 128-bit lanes.
static inline void transpose(Vec* a) {
    __m512 fours[16];
    for (int i = 0; i < 16; i += 4) {
        const auto low = [&](int k) { return _mm512_castps_pd(_mm512_unpacklo_ps(a[k].v, a[k + 1].v)); };
        const auto high = [&](int k) { return _mm512_castps_pd(_mm512_unpackhi_ps(a[k].v, a[k + 1].v)); };
        fours[i + 0] = _mm512_castpd_ps(_mm512_unpacklo_pd(low(i), low(i + 2)));
        fours[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low(i), low(i + 2)));
        fours[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(high(i), high(i + 2)));
        fours[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(high(i), high(i + 2)));
    }
    for (int i = 0; i < 4; ++i) {
        const __m512 even0 = _mm512_shuffle_f32x4(fours[i], fours[i + 4], 0x88);
        const __m512 odd0 = _mm512_shuffle_f32x4(fours[i], fours[i + 4], 0xdd);
        const __m512 even1 = _mm512_shuffle_f32x4(fours[i + 8], fours[i + 12], 0x88);
        const __m512 odd1 = _mm512_shuffle_f32x4(fours[i + 8], fours[i + 12], 0xdd);
        a[i + 0].v = _mm512_shuffle_f32x4(even0, even1, 0x88);
        a[i + 4].v = _mm512_shuffle_f32x4(odd0, odd1, 0x88);
        a[i + 8].v = _mm512_shuffle_f32x4(even0, even1, 0xdd);
        a[i + 12].v = _mm512_shuffle_f32x4(odd0, odd1, 0xdd);
    }
}

/// Transposes the 32-bit elements of 16 vectors.
static inline void transpose(RowCodes* a) {
    Vec floats[16];
    for (int i = 0; i < 16; ++i) floats[i].v = _mm512_castsi512_ps(a[i].v);
    transpose(floats);
    for (int i = 0; i < 16; ++i) a[i].v = _mm512_castps_si512(floats[i].v);
}

static inline Vec round_even(Vec a) {
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
/// a * 2^n for whole n in [-160, 160]
static inline Vec scale_by_power(Vec a, Vec n) { return {_mm512_scalef_ps(a.v, n.v)}; }

/// a0 a0 a2 a2 ..., a1 a1 a3 a3 ..., a1 a0 a3 a2 ...
static inline Vec duplicate_even(Vec a) { return {_mm512_moveldup_ps(a.v)}; }
static inline Vec duplicate_odd(Vec a) { return {_mm512_movehdup_ps(a.v)}; }
static inline Vec swap_pairs(Vec a) { return {_mm512_permute_ps(a.v, 0xb1)}; }
/// The even and the odd elements of the concatenation of a and b.
static inline void deinterleave(Vec a, Vec b, Vec* even, Vec* odd) {
    const __m512i index = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    even->v = _mm512_permutex2var_ps(a.v, index, b.v);
    odd->v = _mm512_permutex2var_ps(a.v, _mm512_add_epi32(index, _mm512_set1_epi32(1)), b.v);
}

}  // namespace slimrt::cpu::SLIMRT_ISA
