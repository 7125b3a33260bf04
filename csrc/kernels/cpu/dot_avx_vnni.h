// dot.h for AVX2 with VNNI.
#pragma once

#include "kernels/cpu/dot_x86.h"

namespace slimrt::cpu::SLIMRT_ISA {

/// The first factor of vpdpbusd is unsigned: signed codes get the zero point 128.
constexpr int wide_offset = 128;
static inline __m256i wide(__m256i w) { return _mm256_xor_si256(w, _mm256_set1_epi8(-128)); }
template <bool is_wide>
static inline __m256i dot(__m256i acc, __m256i w, __m256i x) {
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(w), "x"(x));
    return acc;
}
template <bool is_wide>
static inline __m256i dot_once(__m256i start, __m256i w, __m256i x) {
    return dot<is_wide>(start, w, x);
}
struct PanelPairs : NoPairs {};

}  // namespace slimrt::cpu::SLIMRT_ISA

#include "kernels/cpu/dot_ymm.h"
