// Panel products by smmla (ARMv8.6 i8mm), where it is faster than sdot: a vector of codes is 2 rows of 8
// codes, a vector of sums is 2 rows of 2 tokens.
#pragma once

#include "kernels/cpu/dot.h"

namespace slimrt::cpu::SLIMRT_ISA {

struct ByMatrix {
    static constexpr int n = 4, side_by_side = 8, tokens = 2;
    struct Codes {
        int8x16_t v[2];
    };
    /// Sixteen codes of a token, and of the token `next` bytes further.
    static Codes load(const uint8_t* p, size_t next) {
        const auto pairs = [](const uint8_t* from) { return load_as<int64x2_t>(from); };
        const int64x2_t a = pairs(p), b = pairs(p + next);
        return {{vreinterpretq_s8_s64(vzip1q_s64(a, b)), vreinterpretq_s8_s64(vzip2q_s64(a, b))}};
    }
    static PanelSums start() { return AnyByElement::start(); }
    template <bool is_wide>
    static PanelSums dot(PanelSums acc, PanelCodes w, const Codes& x, int i) {
        return vmmlaq_s32(acc, w, x.v[i]);
    }
    /// Scales of four rows, each twice: in the order of the sums.
    static void store_scales(Vec rows, float* to) {
        store(to, Vec{vzip1q_f32(rows.v, rows.v)});
        store(to + lanes, Vec{vzip2q_f32(rows.v, rows.v)});
    }
    /// Through a general register, whose move uses a pipe that is idle.
    static Vec load_tokens(const uint8_t* p, size_t next) {
        const uint64_t first = load_as<uint32_t>(p), second = load_as<uint32_t>(p + next);
        return {vreinterpretq_f32_u64(vdupq_n_u64(first | second << 32))};
    }
    /// The sums of one token, of four rows.
    static Vec of_token(Vec sums, Vec next, int token) {
        return {token == 0 ? vuzp1q_f32(sums.v, next.v) : vuzp2q_f32(sums.v, next.v)};
    }
    /// Two consecutive words of each row, adjacent.
    static void store_words(uint8_t* to, Words first, Words second) {
        const uint32x4_t a = vreinterpretq_u32_u8(first), b = vreinterpretq_u32_u8(second);
        SLIMRT_ISA::store_words(to, vreinterpretq_u8_u32(vzip1q_u32(a, b)));
        SLIMRT_ISA::store_words(to + 16, vreinterpretq_u8_u32(vzip2q_u32(a, b)));
    }
};

}  // namespace slimrt::cpu::SLIMRT_ISA
