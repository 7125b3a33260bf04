// The search for the scales of a block of 256 weights. It minimises the squared error of the weights: for
// activations whose elements are uncorrelated and alike, that is the error of the product. (Weighting by the
// weights' own size, tried on the models of models/, moves their predictions further at four bits, and makes
// no consistent difference at five and six.)
//
// A lane of a vector is a group, so that four groups are searched at once. A pass takes the scales as given,
// assigns the best codes, and sums the error and the moments from which the least-squares scales for these
// codes follow; repeating it never increases the error.
#pragma once

#include "kernels/cpu/blocks.h"

namespace slimrt::cpu::SLIMRT_ISA {

constexpr int passes = 3;  // from each start; a fourth gains 0.2 % of the error
constexpr int rounds = 2;  // of adapting 6-bit (8-bit) scales, then the block's own

static inline Vec clamp(Vec x, float low, float high) { return min(max(x, splat(low)), splat(high)); }
static inline Vec negative(Vec a) { return {-a.v}; }
/// 1 / a, 0 where a is 0.
static inline Vec inverse(Vec a) {
    const Floats zero = {};
    return {a.v != zero ? splat(1.0f).v / a.v : zero};
}
/// x where a < b, y elsewhere and where either is NaN.
static inline Vec where_less(Vec a, Vec b, Vec x, Vec y) { return {a.v < b.v ? x.v : y.v}; }

static inline float as_half(float x) { return half_to_float(float_to_half(x)); }
/// The f16 value nearest to x among those of at least its magnitude.
static inline float half_beyond(float x) {
    const uint16_t half = float_to_half(x);
    const bool short_of = __builtin_fabsf(half_to_float(half)) < __builtin_fabsf(x);
    return half_to_float(static_cast<uint16_t>(half + short_of));
}

/// `lanes` groups of `size` weights: x[i] has element i of each group.
template <int size>
struct Groups {
    Vec x[size], low, high, sum;

    explicit Groups(const float* from) : low(splat(0.0f)), high(splat(0.0f)), sum(splat(0.0f)) {
        for (int i = 0; i < size; i += lanes) {
            for (int group = 0; group < lanes; ++group) x[i + group] = load(from + group * size + i);
            transpose(x + i);
        }
        low = high = x[0];
        for (const Vec& v : x) {
            low = min(low, v);
            high = max(high, v);
            sum = sum + v;
        }
    }
};

/// Over a group's elements x and their codes q: the squared error, and sums for least squares.
struct Moments {
    Vec error = splat(0.0f), q = splat(0.0f), qq = splat(0.0f), qx = splat(0.0f);
};

/// The range of the integer multiples of an f16 unit.
struct Multiples {
    float lowest, highest, extreme;  // the multiple that the largest value gets at first
};
constexpr Multiples six_bits = {0, 63, 63}, eight_bits = {-128, 127, -128};

/// Chooses the unit among a few that bring the largest value near the end of the range: the multiples k[i] *
/// unit shall be closest to values[i] in squared errors weighted by `weights`. False: f16 cannot represent
/// it.
template <int n>
bool choose_unit(const float (&values)[n], const float (&weights)[n], Multiples range, float* unit,
                 float (&k)[n]) {
    float largest = 0, best = __FLT_MAX__;
    for (const float v : values)
        if (__builtin_fabsf(v) > __builtin_fabsf(largest)) largest = v;
    *unit = 0;
    for (float& multiple : k) multiple = 0;
    if (__builtin_fabsf(largest) < 0x1p-30f) return true;  // f16 has nothing near but 0
    for (int step = 0; step < 8; ++step) {
        // Not below what the largest value needs, however coarse f16 is there.
        const float u = half_beyond(largest / (range.extreme * (1 - static_cast<float>(step) / 64)));
        float multiples[n], error = 0;
        for (int i = 0; i < n; i += lanes) {
            const Vec v = load(values + i);
            const Vec m = round_even(clamp(v * splat(1 / u), range.lowest, range.highest));
            const Vec e = splat(u) * m - v;
            store(multiples + i, m);
            error += sum(load(weights + i) * e * e);
        }
        if (!(error < best)) continue;  // also where u is infinite
        best = error;
        *unit = u;
        memcpy(k, multiples, sizeof multiples);
    }
    return *unit != 0;
}

// Q4_K and Q5_K: element = scale * code - min, codes 0 ... top. scale = d * k, min = dmin * l with k, l of
// six bits for each of the 8 groups of 32.

using Groups32 = Groups<32>;

struct Affine {
    Vec scale, min;
};

struct AffineBlock {
    float d, dmin, k[8], l[8];

    Affine at(int half) const {
        return {splat(d) * load(k + lanes * half), splat(dmin) * load(l + lanes * half)};
    }
};

static inline Vec affine_codes(Vec shifted, Vec inverse_scale, float top) {
    return round_even(clamp(shifted * inverse_scale, 0.0f, top));
}

static inline Moments affine_pass(const Groups32& g, Affine a, float top) {
    Moments m;
    const Vec inv = inverse(a.scale);
    for (const Vec& x : g.x) {
        const Vec shifted = x + a.min, q = affine_codes(shifted, inv, top), e = a.scale * q - shifted;
        m.error = m.error + e * e;
        m.q = m.q + q;
        m.qq = m.qq + q * q;
        m.qx = m.qx + q * x;
    }
    return m;
}

/// Least-squares scale and min >= 0 for given codes; unchanged where all codes are equal.
static inline Affine solve(const Groups32& g, const Moments& s, Affine before) {
    const Vec n = splat(32.0f), zero = splat(0.0f), det = n * s.qq - s.q * s.q, inv = inverse(det);
    const Vec min = (s.q * s.qx - s.qq * g.sum) * inv;
    const Vec scale =
        where_less(min, zero, s.qx * inverse(s.qq), (n * s.qx - s.q * g.sum) * inv);  // through zero
    return {where_less(zero, det, max(scale, zero), before.scale),
            where_less(zero, det, max(min, zero), before.min)};
}

/// Scale and min of four groups, not quantised, and the moments of the best.
static inline Affine affine_search(const Groups32& g, float top, Moments* best_moments) {
    const Vec low = min(g.low, splat(0.0f)), high = max(g.high, low), range = high - low;
    // Fractions of the range cut off at either end: clipping one outlier may pay.
    constexpr float cuts[] = {0.0f, 0.03f};
    Affine best = {splat(0.0f), splat(0.0f)};
    best_moments->error = splat(__FLT_MAX__);
    for (const float cut_low : cuts) {
        for (const float cut_high : cuts) {
            const Vec from = min(low + range * splat(cut_low), splat(0.0f));
            const Vec to = high - range * splat(cut_high);
            Affine a = {(to - from) * splat(1 / top), negative(from)};
            for (int pass = 0; pass < passes; ++pass) {
                const Moments s = affine_pass(g, a, top);
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
static inline float adapt_six_bits(const Groups32 (&g)[2], float top, AffineBlock* block) {
    float error = 0;
    for (int half = 0; half < 2; ++half) {
        float *const k_at = block->k + lanes * half, *const l_at = block->l + lanes * half;
        const Vec k0 = load(k_at), l0 = load(l_at);
        Vec best = splat(__FLT_MAX__), best_k = k0, best_l = l0;
        for (int step = 0; step < 9; ++step) {
            const Vec k = clamp(k0 + splat(static_cast<float>(step / 3 - 1)), 0.0f, 63.0f);
            const Vec l = clamp(l0 + splat(static_cast<float>(step % 3 - 1)), 0.0f, 63.0f);
            const Moments s = affine_pass(g[half], {splat(block->d) * k, splat(block->dmin) * l}, top);
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
static inline void refit(const Groups32 (&g)[2], float top, float error, AffineBlock* block) {
    double kk = 0, kl = 0, ll = 0, kx = 0, lx = 0;  // of k * code and l, with each other and with x
    for (int half = 0; half < 2; ++half) {
        const Moments s = affine_pass(g[half], block->at(half), top);
        const Vec k = load(block->k + lanes * half), l = load(block->l + lanes * half);
        kk += sum(k * k * s.qq);
        kl += sum(k * l * s.q);
        ll += sum(l * l * splat(32.0f));
        kx += sum(k * s.qx);
        lx += sum(l * g[half].sum);
    }
    AffineBlock next = *block;
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
    for (int half = 0; half < 2; ++half) next_error += sum(affine_pass(g[half], next.at(half), top).error);
    if (next_error < error) *block = next;
}

/// The best block found for 256 weights of magnitude at most 2^30. False: f16 cannot represent its scales.
static inline bool search(const float* x, float top, AffineBlock* block) {
    const Groups32 g[2] = {Groups32(x), Groups32(x + 128)};
    float scale[8], min[8], q[8], qq[8], n[8];
    for (int half = 0; half < 2; ++half) {
        Moments s;
        const Affine a = affine_search(g[half], top, &s);
        store(scale + lanes * half, a.scale);
        store(min + lanes * half, a.min);
        store(q + lanes * half, s.q);
        store(qq + lanes * half, s.qq);
        store(n + lanes * half, splat(32.0f));
    }
    if (!choose_unit(scale, qq, six_bits, &block->d, block->k)) return false;
    for (int i = 0; i < 8; ++i) {  // the mins that fit the quantised scales
        const float suited = min[i] + (block->d * block->k[i] - scale[i]) * q[i] / 32;
        min[i] = suited > 0 ? suited : 0;
    }
    if (!choose_unit(min, n, six_bits, &block->dmin, block->l)) return false;
    for (int round = 0; round < rounds; ++round) refit(g, top, adapt_six_bits(g, top, block), block);
    return true;
}

// Q6_K: element = scale * code, codes -32 ... 31. scale = d * k with k of eight bits for each of the 16
// groups of 16.

using Groups16 = Groups<16>;

struct SymmetricBlock {
    float d, k[16];
};

static inline Vec symmetric_codes(Vec x, Vec inverse_scale) {
    return round_even(clamp(x * inverse_scale, -32.0f, 31.0f));
}

static inline Moments symmetric_pass(const Groups16& g, Vec scale) {
    Moments m;
    const Vec inv = inverse(scale);
    for (const Vec& x : g.x) {
        const Vec q = symmetric_codes(x, inv), e = scale * q - x;
        m.error = m.error + e * e;
        m.qq = m.qq + q * q;
        m.qx = m.qx + q * x;
    }
    return m;
}

/// The scale of four groups, not quantised, and the moments of the best. Its sign says which end gets the
/// code -32.
static inline Vec symmetric_search(const Groups16& g, Moments* best_moments) {
    const Vec low = negative(min(g.low, splat(0.0f))), high = max(g.high, splat(0.0f));
    const Vec up = max(high * splat(1.0f / 31), low * splat(1.0f / 32));
    const Vec down = max(low * splat(1.0f / 31), high * splat(1.0f / 32));
    const Vec starts[] = {up, negative(down)};
    Vec best = splat(0.0f);
    best_moments->error = splat(__FLT_MAX__);
    for (Vec scale : starts) {
        for (int pass = 0; pass < passes; ++pass) {
            const Moments s = symmetric_pass(g, scale);
            best = where_less(s.error, best_moments->error, scale, best);
            best_moments->qq = where_less(s.error, best_moments->error, s.qq, best_moments->qq);
            best_moments->error = min(s.error, best_moments->error);
            scale = s.qx * inverse(s.qq);
        }
    }
    return best;
}

/// Changes each group's k by one where that lowers the error with the best codes. Returns the block's error,
/// and the sums from which d follows by least squares.
static inline float adapt_eight_bits(const Groups16 (&g)[4], SymmetricBlock* block, double* kk, double* kx) {
    float error = 0;
    *kk = *kx = 0;
    for (int quarter = 0; quarter < 4; ++quarter) {
        float* const k_at = block->k + lanes * quarter;
        const Vec k0 = load(k_at);
        Vec best = splat(__FLT_MAX__), best_k = k0, qq = splat(0.0f), qx = splat(0.0f);
        for (int step = -1; step <= 1; ++step) {
            const Vec k = clamp(k0 + splat(static_cast<float>(step)), -128.0f, 127.0f);
            const Moments s = symmetric_pass(g[quarter], splat(block->d) * k);
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

static inline bool search(const float* x, SymmetricBlock* block) {
    const Groups16 g[4] = {Groups16(x), Groups16(x + 64), Groups16(x + 128), Groups16(x + 192)};
    float scale[16], qq[16];
    for (int quarter = 0; quarter < 4; ++quarter) {
        Moments s;
        store(scale + lanes * quarter, symmetric_search(g[quarter], &s));
        store(qq + lanes * quarter, s.qq);
    }
    if (!choose_unit(scale, qq, eight_bits, &block->d, block->k)) return false;
    for (int round = 0; round < rounds; ++round) {
        double kk, kx;
        const float error = adapt_eight_bits(g, block, &kk, &kx);
        if (kk == 0) continue;
        const float d = as_half(static_cast<float>(kx / kk));
        float next_error = 0;
        for (int quarter = 0; quarter < 4; ++quarter)
            next_error += sum(symmetric_pass(g[quarter], splat(d) * load(block->k + lanes * quarter)).error);
        if (next_error < error) block->d = d;
    }
    return true;
}

}  // namespace slimrt::cpu::SLIMRT_ISA
