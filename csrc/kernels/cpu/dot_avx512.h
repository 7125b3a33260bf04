// dot.h for AVX-512 with VNNI.
#pragma once

#include "kernels/cpu/dot_x86.h"

namespace slimrt::cpu::SLIMRT_ISA {

static inline void store(Half* p, Vec a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}

using Codes = __m512i;
using Sums = __m512i;
using Acc = Vec;
constexpr bool joins_steps = false;
constexpr int dot_rows = 4;

static inline __m256i load_256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
static inline Codes join(__m256i a, __m256i b) { return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1); }

static inline Codes load_codes(const void* p) { return _mm512_loadu_si512(p); }
static inline Codes load_halves(const void* p, const void* q) { return join(load_256(p), load_256(q)); }
static inline Codes load_twice(const void* p) { return _mm512_broadcast_i64x4(load_256(p)); }
static inline Codes load_nibbles(const void* p, const void* q) {
    const __m128i a = _mm_loadu_si128(static_cast<const __m128i*>(p));
    const __m128i b = _mm_loadu_si128(static_cast<const __m128i*>(q));
    const Codes both = join(_mm256_broadcastsi128_si256(a), _mm256_broadcastsi128_si256(b));
    const Codes shifted = _mm512_srlv_epi64(both, _mm512_set_epi64(4, 4, 0, 0, 4, 4, 0, 0));
    return _mm512_and_si512(shifted, _mm512_set1_epi8(15));
}
static inline Codes fields(Codes c, int shift0, int shift1, int mask) {
    const long long a = shift0, b = shift1;
    const Codes shifted = _mm512_srlv_epi64(c, _mm512_set_epi64(b, b, b, b, a, a, a, a));
    return _mm512_and_si512(shifted, _mm512_set1_epi8(static_cast<char>(mask)));
}
static inline Codes above(Codes low, Codes high) { return _mm512_or_si512(low, _mm512_slli_epi16(high, 4)); }

/// VNNI's first factor is unsigned.
constexpr int wide_offset = 128;
static inline Codes wide(Codes c) { return _mm512_xor_si512(c, _mm512_set1_epi8(-128)); }
/// As instructions: of the intrinsics g++ 12 copies every sum to another register and back.
template <bool is_wide>
static inline Sums dot(Sums acc, Codes w, Codes x) {
    asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
    return acc;
}

constexpr int32_t first_sum = 0;
static inline Sums no_sums() { return Sums{}; }
static inline Sums start_halves(const void* p) {
    const __m128i two = _mm_loadl_epi64(static_cast<const __m128i*>(p));
    const __m512i to = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0);
    return _mm512_maskz_permutexvar_epi32(0x0101, to, _mm512_castsi128_si512(two));
}
static inline Sums start_quarters(const void* p) {
    const __m128i four = _mm_loadu_si128(static_cast<const __m128i*>(p));
    const __m512i to = _mm512_setr_epi32(0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0);
    return _mm512_maskz_permutexvar_epi32(0x1111, to, _mm512_castsi128_si512(four));
}
static inline Acc to_acc(Sums s) { return {_mm512_cvtepi32_ps(s)}; }

using Scales = Vec;

constexpr int unit_blocks = 2;
static inline Scales load_blocks(const void* p) {
    return {_mm512_zextps128_ps512(_mm_castsi128_ps(_mm_loadl_epi64(static_cast<const __m128i*>(p))))};
}
static inline Scales load_eight(const void* p, const void* q) {
    return {_mm512_castsi512_ps(load_halves(p, q))};
}
static inline Scales load_each_twice(const void* p) {
    const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    return {_mm512_permutexvar_ps(twice, _mm512_castsi512_ps(_mm512_castsi256_si512(load_256(p))))};
}
static inline Scales blocks_apart(const void* p, size_t stride) {
    const auto* q = static_cast<const uint8_t*>(p) + stride;
    return {_mm512_zextps128_ps512(load_two_halves(p, q))};
}
static inline Scales eight_scales(const void* p) {
    const __m128i head = _mm_loadu_si128(static_cast<const __m128i*>(p));
    const __m512 codes = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(load_six_bits(head)));
    const __m512i to = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    return {_mm512_mul_ps(codes, _mm512_permutexvar_ps(to, _mm512_castps128_ps512(_mm_cvtph_ps(head))))};
}
static inline Scales sixteen_scales(const void* p, float d) {
    const __m128i codes = _mm_loadu_si128(static_cast<const __m128i*>(p));
    return {_mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes)), _mm512_set1_ps(d))};
}
static inline Acc spread_halves(Scales s, int j) {
    const long long a = 2 * j * 0x100000001, b = (2 * j + 1) * 0x100000001;
    return {_mm512_permutexvar_ps(_mm512_set_epi64(b, b, b, b, a, a, a, a), s.v)};
}
static inline Acc spread_quarters(Scales s, int j) {
    const int i = 4 * j;
    const __m512i to = _mm512_setr_epi32(i, i, i, i, i + 1, i + 1, i + 1, i + 1, i + 2, i + 2, i + 2, i + 2,
                                         i + 3, i + 3, i + 3, i + 3);
    return {_mm512_permutexvar_ps(to, s.v)};
}
static inline Acc add_last_eight(Acc acc, Scales s) {
    return {_mm512_mask_add_ps(acc.v, 0xff00, acc.v, s.v)};
}

static inline void store_columns(Scales* rows, float* to, size_t stride) {
    transpose(rows);
    for (int i = 0; i < 16; ++i) store(to + i * stride, rows[i]);
}

static inline Vec halves_apart(const void* p, size_t stride) {
    const __m512i count = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i at = _mm512_mullo_epi32(count, _mm512_set1_epi32(static_cast<int32_t>(stride)));
    return {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_i32gather_epi32(at, p, 1)))};
}

using PanelCodes = __m512i;
using PanelSums = __m512i;
constexpr int panel_vectors = 2, panel_min = 3;

static inline PanelCodes splat_four(const void* p) {
    int32_t four;
    memcpy(&four, p, sizeof four);
    return _mm512_set1_epi32(four);
}
static inline PanelSums start_all(const void* p) { return splat_four(p); }
static inline PanelCodes load_panel(const void* p) { return _mm512_loadu_si512(p); }
static inline Vec to_vec(PanelSums s) { return {_mm512_cvtepi32_ps(s)}; }

/// Transposes 4 x 4 blocks of 128 bits.
static inline void transpose_quarters(__m512i* a) {
    const __m512i even[2] = {_mm512_shuffle_i32x4(a[0], a[1], 0x88), _mm512_shuffle_i32x4(a[2], a[3], 0x88)};
    const __m512i odd[2] = {_mm512_shuffle_i32x4(a[0], a[1], 0xdd), _mm512_shuffle_i32x4(a[2], a[3], 0xdd)};
    a[0] = _mm512_shuffle_i32x4(even[0], even[1], 0x88);
    a[1] = _mm512_shuffle_i32x4(odd[0], odd[1], 0x88);
    a[2] = _mm512_shuffle_i32x4(even[0], even[1], 0xdd);
    a[3] = _mm512_shuffle_i32x4(odd[0], odd[1], 0xdd);
}
static inline void store_transposed(const Codes* rows, uint8_t* to, size_t stride) {
    __m512i a[4][4];  // a[i][j], 128-bit part p: quadruple 4 p + i of rows 4 j ... 4 j + 3
    for (int j = 0; j < 4; ++j) {
        const __m512i* r = rows + 4 * j;
        const __m512i low01 = _mm512_unpacklo_epi32(r[0], r[1]), low23 = _mm512_unpacklo_epi32(r[2], r[3]);
        const __m512i high01 = _mm512_unpackhi_epi32(r[0], r[1]), high23 = _mm512_unpackhi_epi32(r[2], r[3]);
        a[0][j] = _mm512_unpacklo_epi64(low01, low23);
        a[1][j] = _mm512_unpackhi_epi64(low01, low23);
        a[2][j] = _mm512_unpacklo_epi64(high01, high23);
        a[3][j] = _mm512_unpackhi_epi64(high01, high23);
    }
    for (int i = 0; i < 4; ++i) {
        transpose_quarters(a[i]);
        for (int p = 0; p < 4; ++p) _mm512_storeu_si512(to + (4 * p + i) * stride, a[i][p]);
    }
}

struct ByElement {
    static constexpr int n = 1, side_by_side = 4, tokens = 1;
};

/// See linear_wide.h.
struct WidePairs {
    using Pairs = __m512i;  // two int16 in each lane
    using Sums = __m512i;
    static constexpr int tokens = 6;
    static constexpr int64_t min_tokens = 128;

    static Pairs load_pairs(const void* p) { return _mm512_loadu_si512(p); }
    static Pairs splat_pair(const void* p) { return splat_four(p); }
    static Sums dot(Sums acc, Pairs w, Pairs x) {
        asm("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
        return acc;
    }
    static Vec to_floats(Sums s) { return to_vec(s); }
    /// Of 32 vectors, lane by lane: the largest absolute value, NaN being the largest.
    static Vec largest(const Vec* a) {
        const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
        __m512i most = _mm512_setzero_si512();
        for (int i = 0; i < 32; ++i)
            most = _mm512_max_epu32(most, _mm512_and_si512(_mm512_castps_si512(a[i].v), magnitude));
        return {_mm512_castsi512_ps(most)};
    }
    /// n / max; 0 where max is tiny or NaN.
    static Vec inverse(Vec max, float n) {
        const __mmask16 usable = _mm512_cmp_ps_mask(max.v, _mm512_set1_ps(1e-35f), _CMP_GT_OQ);
        return {_mm512_maskz_div_ps(usable, _mm512_set1_ps(n), max.v)};
    }
    static void store_pairs(void* p, Vec even, Vec odd) {
        const __m512i high = _mm512_slli_epi32(_mm512_cvtps_epi32(odd.v), 16);
        _mm512_storeu_si512(p, _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_cvtps_epi32(even.v), high));
    }
};

}  // namespace slimrt::cpu::SLIMRT_ISA
