// Q3_K and Q6_K: element = scale * code, codes low ... high. scale = d * k with k of six or eight bits for
// each of the 16 groups of 16. Q4_0: the same with one d for each group of 32.
#pragma once

#include "kernels/cpu/quantize_search.h"

namespace slimrt::cpu::SLIMRT_ISA {

/// shrunk: factors of the scale that reaches to both ends, in the starts of a search.
struct SymmetricQ3 {
    static constexpr int n_groups = 16;
    static constexpr float low = -4, high = 3, shrunk[] = {1.0f, 0.85f, 0.7f};
    static constexpr Multiples multiples = {-32, 31, -32};
};
struct SymmetricQ4 {
    static constexpr int n_groups = 8;
    static constexpr float low = -8, high = 7, shrunk[] = {1.0f, 0.9f, 0.8f};
};
struct SymmetricQ6 {
    static constexpr int n_groups = 16;
    static constexpr float low = -32, high = 31, shrunk[] = {1.0f};
    static constexpr Multiples multiples = {-128, 127, -128};
};

template <class Type>
struct SymmetricBlock {
    float d, k[Type::n_groups];
};

template <class Type>
Vec symmetric_codes(Vec x, Vec inverse_scale) {
    return round_even(clamp(x * inverse_scale, Type::low, Type::high));
}

template <class Type, int size>
Moments symmetric_pass(const Groups<size>& g, Vec scale) {
    Moments m;
    const Vec inv = inverse(scale);
    for (int i = 0; i < size; ++i) {
        const Vec q = symmetric_codes<Type>(g.x[i], inv), e = scale * q - g.x[i], wq = g.w[i] * q;
        m.error = m.error + g.w[i] * e * e;
        m.qq = m.qq + wq * q;
        m.qx = m.qx + wq * g.x[i];
    }
    return m;
}

/// The scale of four groups, not quantised, and the moments of the best. Its sign says which end gets the
/// lowest code.
template <class Type, int size>
Vec symmetric_search(const Groups<size>& g, Moments* best_moments) {
    constexpr float high_step = 1 / Type::high, low_step = -1 / Type::low;
    const Vec low = negative(min(g.low, splat(0.0f))), high = max(g.high, splat(0.0f));
    const Vec up = max(high * splat(high_step), low * splat(low_step));
    const Vec down = max(low * splat(high_step), high * splat(low_step));
    Vec best = splat(0.0f);
    best_moments->error = splat(__FLT_MAX__);
    for (const Vec start : {up, negative(down)}) {
        for (const float factor : Type::shrunk) {
            Vec scale = start * splat(factor);
            for (int pass = 0; pass < passes; ++pass) {
                const Moments s = symmetric_pass<Type>(g, scale);
                best = where_less(s.error, best_moments->error, scale, best);
                best_moments->qq = where_less(s.error, best_moments->error, s.qq, best_moments->qq);
                best_moments->error = min(s.error, best_moments->error);
                scale = s.qx * inverse(s.qq);
            }
        }
    }
    return best;
}

/// Changes each group's k by one where that lowers the error with the best codes. Returns the block's error,
/// and the sums from which d follows by least squares.
template <class Type>
float adapt_multiples(const GroupsOfBlock<Type::n_groups>& g, SymmetricBlock<Type>* block, double* kk,
                      double* kx) {
    float error = 0;
    *kk = *kx = 0;
    for (int part = 0; part < g.count; ++part) {
        float* const k_at = block->k + lanes * part;
        const Vec k0 = load(k_at);
        Vec best = splat(__FLT_MAX__), best_k = k0, qq = splat(0.0f), qx = splat(0.0f);
        for (int step = -1; step <= 1; ++step) {
            const Vec k =
                clamp(k0 + splat(static_cast<float>(step)), Type::multiples.lowest, Type::multiples.highest);
            const Moments s = symmetric_pass<Type>(g.of[part], splat(block->d) * k);
            best_k = where_less(s.error, best, k, best_k);
            qq = where_less(s.error, best, s.qq, qq);
            qx = where_less(s.error, best, s.qx, qx);
            best = min(s.error, best);
        }
        store(k_at, best_k);
        error += sum(best);
        *kk += sum(best_k * best_k * qq);
        *kx += sum(best_k * qx);
    }
    return error;
}

template <class Type>
bool search(const float* x, const float* w, SymmetricBlock<Type>* block) {
    constexpr int n_groups = Type::n_groups;
    const GroupsOfBlock<n_groups> g(x, w);
    float scale[n_groups], qq[n_groups];
    for (int part = 0; part < g.count; ++part) {
        Moments s;
        store(scale + lanes * part, symmetric_search<Type>(g.of[part], &s));
        store(qq + lanes * part, s.qq);
    }
    if (!choose_unit(scale, qq, Type::multiples, &block->d, block->k)) return false;
    for (int round = 0; round < rounds; ++round) {
        double kk, kx;
        const float error = adapt_multiples(g, block, &kk, &kx);
        if (kk == 0) continue;
        const float d = as_half(static_cast<float>(kx / kk));
        float next_error = 0;
        for (int part = 0; part < g.count; ++part)
            next_error +=
                sum(symmetric_pass<Type>(g.of[part], splat(d) * load(block->k + lanes * part)).error);
        if (next_error < error) block->d = d;
    }
    return true;
}

}  // namespace slimrt::cpu::SLIMRT_ISA
