// dot.h for AVX2, FMA and F16C, but for the dot products (dot_avx2.h, dot_avx_vnni.h).
#pragma once

#include "kernels/cpu/dot_x86.h"

namespace slimrt::cpu::SLIMRT_ISA {

static inline void store(Half* p, Vec a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}

struct Codes {
    __m256i low, high;
};
using Sums = Codes;
struct Acc {
    Vec low, high;
};
constexpr bool joins_steps = false;
constexpr int dot_rows = 2;

static inline Acc operator*(Acc a, Acc b) { return {a.low * b.low, a.high * b.high}; }
static inline Acc fma(Acc a, Acc b, Acc c) { return {fma(a.low, b.low, c.low), fma(a.high, b.high, c.high)}; }
static inline float sum(Acc a) { return sum(a.low + a.high); }

static inline __m256i load_panel(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
static inline Codes load_halves(const void* p, const void* q) { return {load_panel(p), load_panel(q)}; }
static inline Codes load_codes(const void* p) { return load_halves(p, static_cast<const __m256i*>(p) + 1); }
static inline Codes load_twice(const void* p) { return load_halves(p, p); }
static inline __m256i load_nibbles(const void* p) {
    const __m128i v = _mm_loadu_si128(static_cast<const __m128i*>(p));
    return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(v, 4), v), _mm256_set1_epi8(15));
}
static inline Codes load_nibbles(const void* p, const void* q) { return {load_nibbles(p), load_nibbles(q)}; }
/// Each byte >> shift (<< -shift if negative) & mask.
static inline __m256i field(__m256i c, int shift, int mask) {
    const __m256i there = shift == 0  ? c
                          : shift > 0 ? _mm256_srli_epi16(c, shift)
                                      : _mm256_slli_epi16(c, -shift);
    return _mm256_and_si256(there, _mm256_set1_epi8(static_cast<char>(mask)));
}
/// Fields that are not shifted yet, since insert_high() wants them at other positions.
struct Fields {
    Codes c;
    int shifts[2], mask;

    operator Codes() const { return {field(c.low, shifts[0], mask), field(c.high, shifts[1], mask)}; }
    Codes shifted_up() const {
        return {field(c.low, shifts[0] - 4, mask << 4), field(c.high, shifts[1] - 4, mask << 4)};
    }
};
static inline Fields fields(Codes c, int shift0, int shift1, int mask) { return {c, {shift0, shift1}, mask}; }
static inline Codes insert_high(Codes low, Fields high) {
    const Codes shifted_up = high.shifted_up();
    return {_mm256_or_si256(low.low, shifted_up.low), _mm256_or_si256(low.high, shifted_up.high)};
}

static inline Codes wide(Codes c) { return {wide(c.low), wide(c.high)}; }
template <bool is_wide>
static inline Sums dot(Sums acc, Codes w, Codes x) {
    return {dot_once<is_wide>(acc.low, w.low, x.low), dot_once<is_wide>(acc.high, w.high, x.high)};
}

constexpr int32_t sum_bias = 0;
static inline Sums zero_sums() { return Sums{}; }
static inline Sums start_halves(const void* p) {
    int32_t a[2];
    memcpy(a, p, sizeof a);
    return {_mm256_zextsi128_si256(_mm_cvtsi32_si128(a[0])), _mm256_zextsi128_si256(_mm_cvtsi32_si128(a[1]))};
}
static inline Sums start_quarters(const void* p) {
    int32_t a[4];
    memcpy(a, p, sizeof a);
    return {_mm256_setr_epi32(a[0], 0, 0, 0, a[1], 0, 0, 0), _mm256_setr_epi32(a[2], 0, 0, 0, a[3], 0, 0, 0)};
}
static inline Vec to_vec(__m256i s) { return {_mm256_cvtepi32_ps(s)}; }
static inline Acc to_acc(Sums s) { return {to_vec(s.low), to_vec(s.high)}; }

using Scales = Acc;

static inline Scales load_eight(const void* p, const void* q) {
    return {load(static_cast<const float*>(p)), load(static_cast<const float*>(q))};
}
constexpr int unit_blocks = 2;
static inline Scales load_blocks(const void* p) {
    const __m128i two = _mm_loadl_epi64(static_cast<const __m128i*>(p));
    return {{_mm256_zextps128_ps256(_mm_castsi128_ps(two))}, splat(0)};
}
static inline Scales load_each_twice(const void* p) {
    const Vec eight = load(static_cast<const float*>(p));
    return {{_mm256_permutevar8x32_ps(eight.v, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3))},
            {_mm256_permutevar8x32_ps(eight.v, _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7))}};
}
static inline Scales blocks_apart(const void* p, size_t stride) {
    const auto* q = static_cast<const uint8_t*>(p) + stride;
    return {{_mm256_zextps128_ps256(load_two_halves(p, q))}, splat(0)};
}
static inline Scales powers_apart(const uint8_t* p, size_t stride) {
    return {{_mm256_zextps128_ps256(_mm_castsi128_ps(load_two_powers(p, stride)))}, splat(0)};
}
static inline Scales eight_signed(uint64_t bytes, float d) {
    const __m128i codes = _mm_cvtsi64_si128(static_cast<int64_t>(bytes));
    return {to_vec(_mm256_cvtepi8_epi32(codes)) * splat(d), splat(0)};
}
static inline Scales eight_scales(const void* p) {
    const __m128i head = _mm_loadu_si128(static_cast<const __m128i*>(p)), codes = load_six_bits(head);
    const __m128 d = _mm_cvtph_ps(head);
    const Vec scales = to_vec(_mm256_cvtepu8_epi32(codes));
    const Vec minima = to_vec(_mm256_cvtepu8_epi32(_mm_srli_si128(codes, 8)));
    return {scales * Vec{_mm256_broadcastss_ps(d)}, minima * Vec{_mm256_broadcastss_ps(_mm_movehdup_ps(d))}};
}
static inline Scales sixteen_scales(const void* p, float d) {
    const __m128i codes = _mm_loadu_si128(static_cast<const __m128i*>(p));
    return {to_vec(_mm256_cvtepi8_epi32(codes)) * splat(d),
            to_vec(_mm256_cvtepi8_epi32(_mm_srli_si128(codes, 8))) * splat(d)};
}
static inline Acc spread_halves(Scales s, int j) {
    return {{_mm256_permutevar8x32_ps(s.low.v, _mm256_set1_epi32(2 * j))},
            {_mm256_permutevar8x32_ps(s.low.v, _mm256_set1_epi32(2 * j + 1))}};
}
static inline Acc spread_quarters(Scales s, int j) {
    const __m256 half = j < 2 ? s.low.v : s.high.v;
    const int i = j % 2 * 4;
    return {{_mm256_permutevar8x32_ps(half, _mm256_setr_epi32(i, i, i, i, i + 1, i + 1, i + 1, i + 1))},
            {_mm256_permutevar8x32_ps(
                half, _mm256_setr_epi32(i + 2, i + 2, i + 2, i + 2, i + 3, i + 3, i + 3, i + 3))}};
}
static inline Acc add_last_eight(Acc acc, Scales s) { return {acc.low, acc.high + s.high}; }
static inline void store(float* p, Scales s) {
    store(p, s.low);
    store(p + 8, s.high);
}

using PanelCodes = __m256i;
using PanelSums = __m256i;
constexpr int panel_vectors = 2;
constexpr bool few_in_registers = true;

static inline PanelCodes splat_quad_codes(const void* p) {
    int32_t four;
    memcpy(&four, p, sizeof four);
    return _mm256_set1_epi32(four);
}
static inline PanelSums splat_sum(const void* p) { return splat_quad_codes(p); }
using Words = __m256i;
static inline void load_words(const RowsAt& row, int at, Words (&to)[4]) {
    const auto part = [&](int r) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(row(r) + at)); };
    const auto parts = [&](int r) { return _mm256_set_m128i(part(r + 4), part(r)); };
    const __m256i a = parts(0), b = parts(1), c = parts(2), d = parts(3);
    const __m256i low_ab = _mm256_unpacklo_epi32(a, b), low_cd = _mm256_unpacklo_epi32(c, d);
    const __m256i high_ab = _mm256_unpackhi_epi32(a, b), high_cd = _mm256_unpackhi_epi32(c, d);
    to[0] = _mm256_unpacklo_epi64(low_ab, low_cd);
    to[1] = _mm256_unpackhi_epi64(low_ab, low_cd);
    to[2] = _mm256_unpacklo_epi64(high_ab, high_cd);
    to[3] = _mm256_unpackhi_epi64(high_ab, high_cd);
}
static inline Words load_word(const RowsAt& row, int at) {
    const auto one = [&](int r) { return _mm_loadu_si32(row(r) + at); };
    const auto four = [&](int r) {
        return _mm_unpacklo_epi64(_mm_unpacklo_epi32(one(r), one(r + 1)),
                                  _mm_unpacklo_epi32(one(r + 2), one(r + 3)));
    };
    return _mm256_set_m128i(four(4), four(0));
}
static inline void store_words(void* p, Words w) { _mm256_storeu_si256(static_cast<__m256i*>(p), w); }
static inline Words insert_high(Words low, Words high) {
    return _mm256_or_si256(low, _mm256_slli_epi16(high, 4));
}
static inline Words wide_words(Words w) { return wide(w); }
static inline Words load_table(const void* p) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
static inline Words look_up(Words table, Words w) { return _mm256_shuffle_epi8(table, w); }
static inline Codes look_up(Words table, Codes c) { return {look_up(table, c.low), look_up(table, c.high)}; }
static inline Vec power_of(Words w) {
    const __m256i one = _mm256_set1_epi32(1), e = _mm256_and_si256(w, _mm256_set1_epi32(255));
    const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, one), 23);
    return {_mm256_castsi256_ps(_mm256_max_epi32(normal, _mm256_slli_epi32(_mm256_add_epi32(e, one), 21)))};
}
static inline Vec byte_of(Words w, int i) {
    return to_vec(_mm256_and_si256(_mm256_srli_epi32(w, 8 * i), _mm256_set1_epi32(255)));
}
static inline Vec signed_byte_of(Words w, int i) {
    return to_vec(_mm256_srai_epi32(_mm256_slli_epi32(w, 24 - 8 * i), 24));
}
static inline Vec half_of(Words w, int i) {
    const __m256i low = _mm256_and_si256(_mm256_srli_epi32(w, 16 * i), _mm256_set1_epi32(0xffff));
    const __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x08);
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(both))};
}

struct ByElement {
    static constexpr int n = 1, side_by_side = 4, tokens = 1;

    template <bool is_wide>
    static PanelSums dot_quad(PanelSums acc, Words w, const void* p) {
        return SLIMRT_ISA::dot<is_wide>(acc, w, splat_quad_codes(p));
    }
};

struct Int16Products {
    static constexpr int64_t min_tokens = 0;  // f32 products are as fast
};

}  // namespace slimrt::cpu::SLIMRT_ISA
