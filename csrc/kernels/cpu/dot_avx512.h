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
/// a in the first half, b in the second.
static inline Codes in_halves(long long a, long long b) { return _mm512_set_epi64(b, b, b, b, a, a, a, a); }
/// Fields that are not shifted yet, since insert_high() wants them at other positions.
struct Fields {
    Codes c;
    int shifts[2], mask;

    Codes shifted() const { return _mm512_srlv_epi64(c, in_halves(shifts[0], shifts[1])); }
    operator Codes() const { return _mm512_and_si512(shifted(), _mm512_set1_epi8(static_cast<char>(mask))); }
    /// The fields in bits 4 and up; insert_high() ignores the bits below. Fields four bits apart need one
    /// mask: the one that is not wanted rotates into the low bits.
    Codes shifted_up() const {
        const auto kept = [&](int shift) {
            return static_cast<long long>(0x1111111111111111u * (static_cast<uint64_t>(mask) << shift % 4));
        };
        const auto turn = [](int shift) { return (4 - shift) & 63; };
        const Codes some = _mm512_and_si512(c, in_halves(kept(shifts[0]), kept(shifts[1])));
        return _mm512_rolv_epi64(some, in_halves(turn(shifts[0]), turn(shifts[1])));
    }
};
static inline Fields fields(Codes c, int shift0, int shift1, int mask) { return {c, {shift0, shift1}, mask}; }
static inline Codes insert_high(Fields low, Fields high) {  // selects bits 0-3 of low, bits 4-7 of high
    return _mm512_ternarylogic_epi32(_mm512_set1_epi8(15), low.shifted(), high.shifted_up(), 0xca);
}

/// The first factor of vpdpbusd is unsigned: signed codes get the zero point 128.
constexpr int wide_offset = 128;
static inline Codes wide(Codes c) { return _mm512_xor_si512(c, _mm512_set1_epi8(-128)); }
/// Inline assembly: around the intrinsics g++ 12 copies every sum to another register and back.
template <bool is_wide>
static inline Sums dot(Sums acc, Codes w, Codes x) {
    asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
    return acc;
}

constexpr int32_t sum_bias = 0;
static inline Sums zero_sums() { return Sums{}; }
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
static inline Scales powers_apart(const uint8_t* p, size_t stride) {
    return {_mm512_zextps128_ps512(_mm_castsi128_ps(load_two_powers(p, stride)))};
}
static inline Scales eight_signed(uint64_t bytes, float d) {
    const __m128i codes = _mm_cvtsi64_si128(static_cast<int64_t>(bytes));
    return {_mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes)), _mm512_set1_ps(d))};
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

using PanelCodes = __m512i;
using PanelSums = __m512i;
struct PanelPairs : NoPairs {};
constexpr int panel_vectors = 2;
constexpr bool few_in_registers = true;

static inline PanelCodes splat_quad_codes(const void* p) {
    int32_t four;
    memcpy(&four, p, sizeof four);
    return _mm512_set1_epi32(four);
}
static inline PanelSums splat_sum(const void* p) { return splat_quad_codes(p); }
static inline PanelCodes load_panel(const void* p) { return _mm512_loadu_si512(p); }
static inline Vec to_vec(PanelSums s) { return {_mm512_cvtepi32_ps(s)}; }

using Words = __m512i;
static inline Words insert_high(Words low, Words high) {
    return _mm512_or_si512(low, _mm512_slli_epi16(high, 4));
}
/// a, b, c, d have four rows in each 128-bit lane: transposes words 0 to 3 within the lanes.
static inline void transpose_parts(__m512i a, __m512i b, __m512i c, __m512i d, Words* to) {
    const __m512i low_ab = _mm512_unpacklo_epi32(a, b), low_cd = _mm512_unpacklo_epi32(c, d);
    const __m512i high_ab = _mm512_unpackhi_epi32(a, b), high_cd = _mm512_unpackhi_epi32(c, d);
    to[0] = _mm512_unpacklo_epi64(low_ab, low_cd);
    to[1] = _mm512_unpackhi_epi64(low_ab, low_cd);
    to[2] = _mm512_unpacklo_epi64(high_ab, high_cd);
    to[3] = _mm512_unpackhi_epi64(high_ab, high_cd);
}
static inline void load_words(const RowsAt& row, int at, Words (&to)[4]) {
    const auto part = [&](int r) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(row(r) + at)); };
    const auto parts = [&](int r) {
        const __m512i two = _mm512_inserti32x4(_mm512_castsi128_si512(part(r)), part(r + 4), 1);
        return _mm512_inserti32x4(_mm512_inserti32x4(two, part(r + 8), 2), part(r + 12), 3);
    };
    transpose_parts(parts(0), parts(1), parts(2), parts(3), to);
}
static inline void load_words(const RowsAt& row, int at, Words (&to)[8]) {
    const auto parts = [&](int r) { return load_halves(row(r) + at, row(r + 4) + at); };
    Words first[4], last[4];  // of rows 0-7 and 8-15: words i and i + 4 alternate
    transpose_parts(parts(0), parts(1), parts(2), parts(3), first);
    transpose_parts(parts(8), parts(9), parts(10), parts(11), last);
    for (int i = 0; i < 4; ++i) {
        to[i] = _mm512_shuffle_i32x4(first[i], last[i], 0x88);
        to[i + 4] = _mm512_shuffle_i32x4(first[i], last[i], 0xdd);
    }
}
static inline Words load_word(const RowsAt& row, int at) {
    const auto one = [&](int r) { return _mm_loadu_si32(row(r) + at); };
    const auto four = [&](int r) {
        return _mm_unpacklo_epi64(_mm_unpacklo_epi32(one(r), one(r + 1)),
                                  _mm_unpacklo_epi32(one(r + 2), one(r + 3)));
    };
    return join(_mm256_set_m128i(four(4), four(0)), _mm256_set_m128i(four(12), four(8)));
}
static inline void store_words(void* p, Words w) { _mm512_storeu_si512(p, w); }
static inline Words wide_words(Words w) { return wide(w); }
static inline Words field(Words w, int shift, int mask) {
    return _mm512_and_si512(_mm512_srli_epi32(w, shift), _mm512_set1_epi8(static_cast<char>(mask)));
}
static inline Words load_table(const void* p) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
static inline Words look_up(Words table, Words w) { return _mm512_shuffle_epi8(table, w); }
static inline Vec power_of(Words w) {
    const __m512i one = _mm512_set1_epi32(1), e = _mm512_and_si512(w, _mm512_set1_epi32(255));
    const __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(e, one), 23);
    return {_mm512_castsi512_ps(_mm512_max_epi32(normal, _mm512_slli_epi32(_mm512_add_epi32(e, one), 21)))};
}
static inline Vec byte_of(Words w, int i) {
    return to_vec(_mm512_and_si512(_mm512_srli_epi32(w, 8 * i), _mm512_set1_epi32(255)));
}
static inline Vec signed_byte_of(Words w, int i) {
    return to_vec(_mm512_srai_epi32(_mm512_slli_epi32(w, 24 - 8 * i), 24));
}
static inline Vec half_of(Words w, int i) {
    return {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(w, 16 * i)))};
}

struct ByElement {
    static constexpr int n = 1, side_by_side = 4, tokens = 1;

    /// `volatile` keeps the order of the source, in which no product waits for the previous one.
    template <bool is_wide>
    static PanelSums dot_quad(PanelSums acc, Words w, const void* p) {
        struct __attribute__((packed, may_alias)) Four {
            int32_t codes;
        };
        asm volatile("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*static_cast<const Four*>(p)));
        return acc;
    }
};

/// See linear_int16.h.
struct Int16Products {
    using Pairs = __m512i;  // two int16 in each lane
    using Sums = __m512i;
    static constexpr int tokens = 6;
    static constexpr int64_t min_tokens = 128;

    static Pairs load_pairs(const void* p) { return _mm512_loadu_si512(p); }
    static Pairs splat_pair(const void* p) { return splat_quad_codes(p); }
    static Sums dot(Sums acc, Pairs w, Pairs x) {
        asm("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
        return acc;
    }
    static Vec to_floats(Sums s) { return to_vec(s); }
    /// Lane by lane the largest magnitude of 32 vectors; NaN counts as the largest.
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
