// dot.h for AVX2, FMA and F16C.
#pragma once

#include "kernels/cpu/dot_x86.h"

namespace slimrt::cpu::SLIMRT_ISA {

constexpr int wide_offset = 0;
static inline __m256i wide(__m256i w) { return w; }
/// maddubs adds two products of an unsigned and a signed factor in 16 bits with saturation: codes below 64
/// cannot overflow; wide ones give their sign to the activation.
template <bool is_wide>
static inline __m256i pairs_of(__m256i w, __m256i x) {
    return is_wide ? _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w))
                   : _mm256_maddubs_epi16(w, x);
}
static inline __m256i sum_pairs(__m256i pairs) { return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }
template <bool is_wide>
static inline __m256i dot_once(__m256i start, __m256i w, __m256i x) {
    return _mm256_add_epi32(start, sum_pairs(pairs_of<is_wide>(w, x)));
}
/// Inline assembly: g++ would add many of these up as a tree, for which there are too few registers.
template <bool is_wide>
static inline __m256i dot(__m256i acc, __m256i w, __m256i x) {
    asm("vpaddd %1, %0, %0" : "+x"(acc) : "x"(sum_pairs(pairs_of<is_wide>(w, x))));
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
    __m256i added_to(__m256i sums) const { return _mm256_add_epi32(sums, sum_pairs(v)); }
};

}  // namespace slimrt::cpu::SLIMRT_ISA

#include "kernels/cpu/dot_ymm.h"
