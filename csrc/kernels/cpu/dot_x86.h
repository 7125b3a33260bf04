// The parts of dot.h that AVX2 and AVX-512 share.
#pragma once

#include <immintrin.h>

namespace slimrt::cpu::SLIMRT_ISA {

static inline float half_to_float(uint16_t h) { return _cvtsh_ss(h); }

/// The 6-bit scales (8), then minima (8), of Q4_K and Q5_K. The header is d, dmin and 32-bit words a b c.
static inline __m128i load_six_bits(__m128i head) {
    const __m128i acbc = _mm_setr_epi8(4, 5, 6, 7, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m128i _a_b = _mm_setr_epi8(-1, -1, -1, -1, 4, 5, 6, 7, -1, -1, -1, -1, 8, 9, 10, 11);
    const __m128i low = _mm_srlv_epi32(_mm_shuffle_epi8(head, acbc), _mm_setr_epi32(0, 0, 0, 4));
    const __m128i high = _mm_srli_epi16(_mm_shuffle_epi8(head, _a_b), 2);
    return _mm_or_si128(_mm_and_si128(low, _mm_setr_epi32(0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f)),
                        _mm_and_si128(high, _mm_set1_epi8(0x30)));
}

/// The f16 values at p and q.
static inline __m128 load_two_halves(const void* p, const void* q) {
    uint16_t a, b;
    memcpy(&a, p, sizeof a);
    memcpy(&b, q, sizeof b);
    return _mm_cvtph_ps(_mm_insert_epi16(_mm_insert_epi16(_mm_setzero_si128(), a, 0), b, 1));
}

/// Two E8M0 exponents, see power_bits.
static inline __m128i load_two_powers(const uint8_t* p, size_t stride) {
    return _mm_insert_epi32(_mm_cvtsi32_si128(static_cast<int>(powers.bits[p[0]])),
                            static_cast<int>(powers.bits[p[stride]]), 1);
}

}  // namespace slimrt::cpu::SLIMRT_ISA
