// dot.h for AVX2, FMA and F16C.
#pragma once

#include "kernels/cpu/dot_x86.h"

namespace slimrt::cpu::SLIMRT_ISA {

constexpr int wide_offset = 0;
static inline __m256i wide(__m256i w) { return w; }
/// maddubs adds two products of an unsigned and a signed factor in 16 bits: codes below 64 cannot overflow,
/// wide ones lend their sign to the activation.
template <bool is_wide>
static inline __m256i pairs_of(__m256i w, __m256i x) {
    return is_wide ? _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w))
                   : _mm256_maddubs_epi16(w, x);
}
static inline __m256i joined(__m256i pairs) { return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }
template <bool is_wide>
static inline __m256i dot_once(__m256i start, __m256i w, __m256i x) {
    return _mm256_add_epi32(start, joined(pairs_of<is_wide>(w, x)));
}
/// One of many: g++ would add them up as a tree, for which there are too few registers.
template <bool is_wide>
static inline __m256i dot(__m256i acc, __m256i w, __m256i x) {
    asm("vpaddd %1, %0, %0" : "+x"(acc) : "x"(joined(pairs_of<is_wide>(w, x))));
    return acc;
}
struct PanelPairs {
    static constexpr int max = 32767;
    __m256i v;

    static PanelPairs of(__m256i w, __m256i x) { return {pairs_of<false>(w, x)}; }
    PanelPairs plus(__m256i w, __m256i x) const {
        PanelPairs all = *this;
        asm("vpaddw %1, %0, %0" : "+x"(all.v) : "x"(of(w, x).v));
        return all;
    }
    __m256i added_to(__m256i sums) const { return _mm256_add_epi32(sums, joined(v)); }
};

}  // namespace slimrt::cpu::SLIMRT_ISA

#include "kernels/cpu/dot_ymm.h"

namespace slimrt::cpu::SLIMRT_ISA {

struct FourGroups {
    template <size_t stride>
    static Codes nibbles(const uint8_t* p) {
        const auto part = [&](size_t i) { return parts(p + i * stride, p + (i + 1) * stride); };
        return {part(0), part(2)};
    }
    static Codes low(Codes c) { return fields(c, 0, 0, 15); }
    static Codes high(Codes c) { return fields(c, 4, 4, 15); }
    static Sums start(const void* p) {  // in any sum of its quarter
        const __m256i four = _mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(p)));
        return {_mm256_and_si256(four, _mm256_setr_epi32(-1, 0, 0, 0, 0, -1, 0, 0)),
                _mm256_and_si256(four, _mm256_setr_epi32(0, 0, -1, 0, 0, 0, 0, -1))};
    }
    template <class Weight>
    static Sums dots(Sums start, const Codes (&w)[2], const Codes (&x)[2]) {
        return {both<Weight::is_wide>(start.low, w[0].low, x[0].low, w[1].low, x[1].low),
                both<Weight::is_wide>(start.high, w[0].high, x[0].high, w[1].high, x[1].high)};
    }
    template <bool four>
    static Scales scales_of(const void* p) {
        return four ? of_four(_mm_loadu_ps(static_cast<const float*>(p))) : load_eight(p, p);
    }
    static Scales halves_apart(const uint8_t* p, size_t stride) {
        return of_four(load_four_halves(p, stride));
    }
    static Scales powers_apart(const uint8_t* p, size_t stride) {
        return of_four(load_four_powers(p, stride));
    }

  private:
    /// Added in 16 bits first where that cannot overflow either.
    template <bool is_wide>
    static __m256i both(__m256i start, __m256i w, __m256i x, __m256i w2, __m256i x2) {
        if (is_wide) return dot_once<true>(dot_once<true>(start, w, x), w2, x2);
        return _mm256_add_epi32(start,
                                joined(_mm256_add_epi16(pairs_of<false>(w, x), pairs_of<false>(w2, x2))));
    }
    static Scales of_four(__m128 four) { return {{_mm256_zextps128_ps256(four)}, splat(0)}; }
    static __m256i parts(const uint8_t* p, const uint8_t* q) {
        const auto part = [](const uint8_t* at) {
            return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
        };
        return _mm256_set_m128i(part(q), part(p));
    }
};

}  // namespace slimrt::cpu::SLIMRT_ISA
