// Q2_K, Q4_K and Q5_K: element = scale * code - min, codes 0 ... top. scale = d * k, min = dmin * l with k, l
// of four or six bits for each group.
#pragma once

#include "kernels/cpu/quantize_search.h"

namespace slimrt::cpu::SLIMRT_ISA {

/// cuts: fractions of the range to cut off at either end, or to add, in the starts of a search: clipping one
/// outlier may pay, and few codes are better spread.
struct AffineQ2 {
    static constexpr int n_groups = 16;
    static constexpr float top = 3, cuts[] = {-0.1f, 0.0f, 0.1f, 0.2f};
    static constexpr Multiples multiples = {0, 15, 15};
};
struct AffineQ4 {
    static constexpr int n_groups = 8;
    static constexpr float top = 15, cuts[] = {0.0f, 0.03f};
    static constexpr Multiples multiples = {0, 63, 63};
};
struct AffineQ5 : AffineQ4 {
    static constexpr float top = 31;
};

struct Affine {
    Vec scale, min;
};

template <class Type>
struct AffineBlock {
    float d, dmin, k[Type::n_groups], l[Type::n_groups];

    Affine at(int part) const {
        return {splat(d) * load(k + lanes * part), splat(dmin) * load(l + lanes * part)};
    }
};

static inline Vec affine_codes(Vec shifted, Vec inverse_scale, float top) {
    return round_even(clamp(shifted * inverse_scale, 0.0f, top));
}

template <int size>
Moments affine_pass(const Groups<size>& g, Affine a, float top) {
    Moments m;
    const Vec inv = inverse(a.scale);
    for (int i = 0; i < size; ++i) {
        const Vec shifted = g.x[i] + a.min, q = affine_codes(shifted, inv, top), e = a.scale * q - shifted;
        const Vec wq = g.w[i] * q;
        m.error = m.error + g.w[i] * e * e;
        m.q = m.q + wq;
        m.qq = m.qq + wq * q;
        m.qx = m.qx + wq * g.x[i];
    }
    return m;
}

/// Least-squares scale and min >= 0 for given codes; unchanged where all codes are equal.
template <int size>
Affine solve(const Groups<size>& g, const Moments& s, Affine before) {
    const Vec zero = splat(0.0f), product = g.n * s.qq, det = product - s.q * s.q, inv = inverse(det);
    const Vec noise = product * splat(1e-6f);  // what rounding leaves of a det that is 0
    const Vec min = (s.q * s.qx - s.qq * g.sum) * inv;
    const Vec scale = where_less(min, zero, s.qx * inverse(s.qq), (g.n * s.qx - s.q * g.sum) * inv);
    return {where_less(noise, det, max(scale, zero), before.scale),
            where_less(noise, det, max(min, zero), before.min)};
}

/// Scale and min of four groups, not quantised, and the moments of the best.
template <class Type, int size>
Affine affine_search(const Groups<size>& g, Moments* best_moments) {
    const Vec low = min(g.low, splat(0.0f)), high = max(g.high, low), range = high - low;
    Affine best = {splat(0.0f), splat(0.0f)};
    best_moments->error = splat(__FLT_MAX__);
    for (const float cut_low : Type::cuts) {
        for (const float cut_high : Type::cuts) {
            const Vec from = min(low + range * splat(cut_low), splat(0.0f));
            const Vec to = high - range * splat(cut_high);
            Affine a = {(to - from) * splat(1 / Type::top), negative(from)};
            for (int pass = 0; pass < passes; ++pass) {
                const Moments s = affine_pass(g, a, Type::top);
                const Vec error = best_moments->error;
                best = {where_less(s.error, error, a.scale, best.scale),
                        where_less(s.error, error, a.min, best.min)};
                best_moments->q = where_less(s.error, error, s.q, best_moments->q);
                best_moments->qq = where_less(s.error, error, s.qq, best_moments->qq);
                best_moments->error = min(s.error, error);
                a = solve(g, s, a);
            }
        }
    }
    return best;
}

/// Changes each group's k and l by one where that lowers the error with the best codes. Returns the block's
/// error.
template <class Type>
float adapt_multiples(const GroupsOfBlock<Type::n_groups>& g, AffineBlock<Type>* block) {
    constexpr float highest = Type::multiples.highest;
    float error = 0;
    for (int part = 0; part < g.count; ++part) {
        float *const k_at = block->k + lanes * part, *const l_at = block->l + lanes * part;
        const Vec k0 = load(k_at), l0 = load(l_at);
        Vec best = splat(__FLT_MAX__), best_k = k0, best_l = l0;
        for (int step = 0; step < 9; ++step) {
            const Vec k = clamp(k0 + splat(static_cast<float>(step / 3 - 1)), 0.0f, highest);
            const Vec l = clamp(l0 + splat(static_cast<float>(step % 3 - 1)), 0.0f, highest);
            const Moments s =
                affine_pass(g.of[part], {splat(block->d) * k, splat(block->dmin) * l}, Type::top);
            best_k = where_less(s.error, best, k, best_k);
            best_l = where_less(s.error, best, l, best_l);
            best = min(s.error, best);
        }
        store(k_at, best_k);
        store(l_at, best_l);
        error += sum(best);
    }
    return error;
}

/// Least squares of d and dmin for the codes, k and l as they are; kept if the error, with new codes, is
/// lower.
template <class Type>
void refit(const GroupsOfBlock<Type::n_groups>& g, float error, AffineBlock<Type>* block) {
    double kk = 0, kl = 0, ll = 0, kx = 0, lx = 0;  // of k * code and l, with each other and with x
    for (int part = 0; part < g.count; ++part) {
        const Moments s = affine_pass(g.of[part], block->at(part), Type::top);
        const Vec k = load(block->k + lanes * part), l = load(block->l + lanes * part);
        kk += sum(k * k * s.qq);
        kl += sum(k * l * s.q);
        ll += sum(l * l * g.of[part].n);
        kx += sum(k * s.qx);
        lx += sum(l * g.of[part].sum);
    }
    AffineBlock<Type> next = *block;
    const double det = kk * ll - kl * kl;
    if (det > 1e-9 * kk * ll) {
        next.d = as_half(static_cast<float>((kx * ll - kl * lx) / det));
        next.dmin = as_half(static_cast<float>((kl * kx - kk * lx) / det));
    } else if (kk > 0 && ll == 0) {
        next.d = as_half(static_cast<float>(kx / kk));
    } else if (ll > 0 && kk == 0) {
        next.dmin = as_half(static_cast<float>(-lx / ll));
    }
    if (next.d < 0 || next.dmin < 0) return;  // other readers may rely on scale and min >= 0
    float next_error = 0;
    for (int part = 0; part < g.count; ++part)
        next_error += sum(affine_pass(g.of[part], next.at(part), Type::top).error);
    if (next_error < error) *block = next;
}

/// The best block found for 256 weights of magnitude at most 2^30. False: f16 cannot represent its scales.
template <class Type>
bool search(const float* x, const float* w, AffineBlock<Type>* block) {
    constexpr int n_groups = Type::n_groups;
    const GroupsOfBlock<n_groups> g(x, w);
    float scale[n_groups], min[n_groups], q[n_groups], qq[n_groups], n[n_groups];
    for (int part = 0; part < g.count; ++part) {
        Moments s;
        const Affine a = affine_search<Type>(g.of[part], &s);
        store(scale + lanes * part, a.scale);
        store(min + lanes * part, a.min);
        store(q + lanes * part, s.q);
        store(qq + lanes * part, s.qq);
        store(n + lanes * part, g.of[part].n);
    }
    if (!choose_unit(scale, qq, Type::multiples, &block->d, block->k)) return false;
    for (int i = 0; i < n_groups; ++i) {  // the mins that fit the quantised scales
        const float suited = min[i] + (block->d * block->k[i] - scale[i]) * q[i] / n[i];
        min[i] = suited > 0 ? suited : 0;
    }
    if (!choose_unit(min, n, Type::multiples, &block->dmin, block->l)) return false;
    for (int round = 0; round < rounds; ++round) refit(g, adapt_multiples(g, block), block);
    return true;
}

}  // namespace slimrt::cpu::SLIMRT_ISA
