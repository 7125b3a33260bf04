// dot.h for any machine; the loops are such that compilers vectorise them.
#pragma once

namespace slimrt::cpu::SLIMRT_ISA {

static inline float half_to_float(uint16_t h) {
    const Half padded[lanes] = {{h}};
    return load(padded).v[0];
}

static inline uint16_t float_to_half(float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    const uint32_t sign = u >> 16 & 0x8000, rest = u & 0x7fffffff;
    if (rest > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00 | (rest >> 13 & 0x3ff));  // NaN
    if (rest >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // rounds to infinity
    if (rest < 0x38800000) {  // subnormal: in the sum with 0.5, the mantissa counts units of 2^-24
        const float shifted = __builtin_fabsf(f) + 0.5f;
        memcpy(&u, &shifted, sizeof u);
        return static_cast<uint16_t>(sign | (u - 0x3f000000));
    }
    return static_cast<uint16_t>(sign | (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13);
}
static inline void store(Half* p, Vec a) {
    Half h[lanes];
    for (int i = 0; i < lanes; ++i) h[i].bits = float_to_half(a.v[i]);
    memcpy(p, h, sizeof h);
}

struct Codes {
    uint8_t v[64];
};
struct Sums {  // of 16 products each
    int32_t v[4];
};
using Acc = Vec;
constexpr int dot_rows = 1;

static inline Codes load_halves(const void* p, const void* q) {
    Codes c;
    memcpy(c.v, p, 32);
    memcpy(c.v + 32, q, 32);
    return c;
}
static inline Codes load_codes(const void* p) { return load_halves(p, static_cast<const uint8_t*>(p) + 32); }
static inline Codes load_twice(const void* p) { return load_halves(p, p); }
static inline void nibbles(const uint8_t* from, uint8_t* to) {
    for (int i = 0; i < 16; ++i) {
        to[i] = from[i] & 15;
        to[i + 16] = from[i] >> 4;
    }
}
static inline Codes load_nibbles(const void* p, const void* q) {
    Codes c;
    nibbles(static_cast<const uint8_t*>(p), c.v);
    nibbles(static_cast<const uint8_t*>(q), c.v + 32);
    return c;
}
static inline Codes fields(Codes c, int shift0, int shift1, int mask) {
    for (int i = 0; i < 32; ++i) c.v[i] = static_cast<uint8_t>(c.v[i] >> shift0 & mask);
    for (int i = 32; i < 64; ++i) c.v[i] = static_cast<uint8_t>(c.v[i] >> shift1 & mask);
    return c;
}
static inline Codes above(Codes low, Codes high) {
    for (int i = 0; i < 64; ++i) low.v[i] = static_cast<uint8_t>(low.v[i] | high.v[i] << 4);
    return low;
}

/// Codes below 64 read the same as signed bytes.
constexpr int wide_offset = 0;
static inline Codes wide(Codes c) { return c; }
template <bool is_wide>
static inline Sums dot(Sums acc, const Codes& w, const Codes& x) {
    for (int g = 0; g < 4; ++g) {
        int32_t total = 0;
        for (int i = 16 * g; i < 16 * g + 16; ++i) {
            total += static_cast<int8_t>(w.v[i]) * static_cast<int8_t>(x.v[i]);
        }
        acc.v[g] += total;
    }
    return acc;
}

static inline Sums start_quarters(const void* p) {
    Sums s;
    memcpy(s.v, p, sizeof s.v);
    return s;
}
static inline Sums start_halves(const void* p) {
    int32_t a[2];
    memcpy(a, p, sizeof a);
    return {{a[0], 0, a[1], 0}};
}
static inline Acc to_acc(Sums s) {
    Acc a;
    for (int i = 0; i < 4; ++i) a.v[i] = static_cast<float>(s.v[i]);
    return a;
}

struct Scales {
    float v[16];
};

static inline Scales operator*(Scales a, const Scales& b) {
    for (int i = 0; i < 16; ++i) a.v[i] *= b.v[i];
    return a;
}
static inline void store(float* p, const Scales& s) { memcpy(p, s.v, sizeof s.v); }
static inline Scales load_eight(const void* p, const void* q) {
    Scales s;
    memcpy(s.v, p, 32);
    memcpy(s.v + 8, q, 32);
    return s;
}
static inline Scales load_two(const void* p) {
    Scales s = {};
    memcpy(s.v, p, 8);
    return s;
}
static inline Scales load_each_twice(const void* p) {
    const Scales once = load_eight(p, p);
    Scales s;
    for (int i = 0; i < 16; ++i) s.v[i] = once.v[i / 2];
    return s;
}
static inline float load_half(const void* p) {
    uint16_t h;
    memcpy(&h, p, sizeof h);
    return half_to_float(h);
}
static inline Scales two_scales(const void* p, const void* q) { return {{load_half(p), load_half(q)}}; }
static inline Scales eight_scales(const void* p) {
    uint32_t words[4];
    memcpy(words, p, sizeof words);
    const auto [halves, a, b, c] = words;
    const uint32_t six = 0x3f3f3f3f, four = 0x0f0f0f0f, upper = 0x30303030;
    const uint32_t codes[4] = {a & six, (c & four) | (a >> 2 & upper), b & six, (c >> 4 & four) | (b >> 2 & upper)};
    const float d[2] = {half_to_float(halves & 0xffff), half_to_float(halves >> 16)};
    Scales s;
    for (int i = 0; i < 16; ++i) s.v[i] = d[i / 8] * static_cast<float>(codes[i / 4] >> i % 4 * 8 & 255);
    return s;
}
static inline Scales sixteen_scales(const void* p, float d) {
    Scales s;
    for (int i = 0; i < 16; ++i) s.v[i] = d * static_cast<const int8_t*>(p)[i];
    return s;
}
static inline Acc spread_halves(const Scales& s, int j) {
    const float a = s.v[2 * j], b = s.v[2 * j + 1];
    return {Floats{a, a, b, b}};
}
static inline Acc spread_quarters(const Scales& s, int j) { return load(s.v + 4 * j); }
static inline Acc add_last_eight(Acc acc, const Scales& s) { return acc + (load(s.v + 8) + load(s.v + 12)); }

struct PanelCodes {
    int8_t v[16];
};
struct PanelSums {
    int32_t v[4];
};
constexpr int panel_vectors = 1, panel_tokens = 4;

static inline PanelCodes load_panel(const void* p) {
    PanelCodes c;
    memcpy(&c, p, sizeof c);
    return c;
}
static inline PanelCodes splat_four(const void* p) {
    PanelCodes c;
    for (int i = 0; i < 4; ++i) memcpy(c.v + 4 * i, p, 4);
    return c;
}
static inline PanelSums start_all(const void* p) {
    PanelSums s;
    for (int i = 0; i < 4; ++i) memcpy(s.v + i, p, 4);
    return s;
}
template <bool is_wide>
static inline PanelSums dot(PanelSums acc, const PanelCodes& w, const PanelCodes& x) {
    int16_t product[16];
    for (int i = 0; i < 16; ++i) product[i] = static_cast<int16_t>(w.v[i] * x.v[i]);
    for (int i = 0; i < 16; ++i) acc.v[i / 4] += product[i];
    return acc;
}
static inline Vec to_vec(PanelSums s) {
    Vec a;
    for (int i = 0; i < 4; ++i) a.v[i] = static_cast<float>(s.v[i]);
    return a;
}
static inline void store_transposed(const Codes* rows, uint8_t* to, size_t stride) {
    for (int q = 0; q < 16; ++q) {
        for (int r = 0; r < lanes; ++r) memcpy(to + q * stride + 4 * r, rows[r].v + 4 * q, 4);
    }
}

}  // namespace slimrt::cpu::SLIMRT_ISA
