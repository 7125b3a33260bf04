// What linear_panel.h multiplies by with the instructions for products of matrices of bytes, where they are
// faster than dot products: a vector of codes is two rows of eight, one of sums is two rows of two tokens.
#pragma once

#include "kernels/cpu/dot.h"

namespace slimrt::cpu::SLIMRT_ISA {

struct ByMatrix {
    static constexpr int n = 4, side_by_side = 8, tokens = 2;
    struct Codes {
        int8x16_t v[2];
    };
    /// Sixteen codes of a token and of that `next` bytes further.
    static Codes load(const uint8_t* p, size_t next) {
        const auto pairs = [](const uint8_t* from) { return load_as<int64x2_t>(from); };
        const int64x2_t a = pairs(p), b = pairs(p + next);
        return {{vreinterpretq_s8_s64(vzip1q_s64(a, b)), vreinterpretq_s8_s64(vzip2q_s64(a, b))}};
    }
    template <bool is_wide>
    static PanelSums dot(PanelSums acc, PanelCodes w, const Codes& x, int i) {
        return vmmlaq_s32(acc, w, x.v[i]);
    }
    /// Of four rows, and of two tokens, in the order of the sums that they belong to.
    static void store_scales(Vec rows, float* to) {
        store(to, Vec{vzip1q_f32(rows.v, rows.v)});
        store(to + lanes, Vec{vzip2q_f32(rows.v, rows.v)});
    }
    static Vec load_tokens(const uint8_t* p, size_t next) {
        const float32x2_t two = {load_as<float>(p), load_as<float>(p + next)};
        return {vcombine_f32(two, two)};
    }
    /// One token's, of four rows.
    static Vec of_token(Vec sums, Vec next, int token) {
        return {token == 0 ? vuzp1q_f32(sums.v, next.v) : vuzp2q_f32(sums.v, next.v)};
    }
    static void store_transposed(const SLIMRT_ISA::Codes* rows, uint8_t* to, size_t stride) {
        const auto halves = [&](int r, int i) { return vreinterpretq_s64_u8(rows[r].v[i]); };
        for (int r = 0; r < lanes; r += 2, to += 16) {
            for (int i = 0; i < 4; ++i) {
                const int64x2_t low = vzip1q_s64(halves(r, i), halves(r + 1, i));
                const int64x2_t high = vzip2q_s64(halves(r, i), halves(r + 1, i));
                memcpy(to + 2 * i * stride, &low, sizeof low);
                memcpy(to + (2 * i + 1) * stride, &high, sizeof high);
            }
        }
    }
};

}  // namespace slimrt::cpu::SLIMRT_ISA
