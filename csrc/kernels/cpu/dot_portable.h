// dot.h for any machine, in loops that compilers vectorise.
#pragma once

namespace slimrt::cpu::SLIMRT_ISA {

/// As from_half() in simd_portable.h, for one number.
static inline float half_to_float(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16,
                   magnitude = static_cast<uint32_t>(h & 0x7fff) << 13;
    float f;
    memcpy(&f, &magnitude, sizeof f);
    f *= 0x1p112f;
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    u |= sign | (magnitude >= 0x0f800000 ? 0x7f800000 : 0);
    memcpy(&f, &u, sizeof f);
    return f;
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

typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef int8_t SignedBytes __attribute__((vector_size(16)));
typedef int8_t HalfBytes __attribute__((vector_size(8)));
typedef int16_t Shorts __attribute__((vector_size(16)));
typedef uint16_t ShortBits __attribute__((vector_size(16)));

struct Codes {
    Bytes v[4];
};
using Sums = Ints;  // of 16 products each
using Acc = Vec;
constexpr bool joins_steps = false;
constexpr int dot_rows = 1;

static inline Codes load_halves(const void* p, const void* q) {
    Codes c;
    memcpy(c.v, p, 32);
    memcpy(c.v + 2, q, 32);
    return c;
}
static inline Codes load_codes(const void* p) { return load_halves(p, static_cast<const uint8_t*>(p) + 32); }
static inline Codes load_twice(const void* p) { return load_halves(p, p); }
/// (a >> shift) & mask; the mask removes what comes from the byte above.
static inline Bytes field(Bytes a, int shift, int mask) {
    const ShortBits bits = reinterpret_cast<ShortBits>(a) >> static_cast<uint16_t>(shift);
    return reinterpret_cast<Bytes>(bits) & static_cast<uint8_t>(mask);
}
static inline Codes load_nibbles(const void* p, const void* q) {
    Bytes a, b;
    memcpy(&a, p, sizeof a);
    memcpy(&b, q, sizeof b);
    return {{field(a, 0, 15), field(a, 4, 15), field(b, 0, 15), field(b, 4, 15)}};
}
static inline Codes fields(const Codes& c, int shift0, int shift1, int mask) {
    return {{field(c.v[0], shift0, mask), field(c.v[1], shift0, mask), field(c.v[2], shift1, mask),
             field(c.v[3], shift1, mask)}};
}
static inline Codes insert_high(const Codes& low, const Codes& high) {
    Codes c;
    for (int i = 0; i < 4; ++i) c.v[i] = low.v[i] | high.v[i] << 4;
    return c;
}

/// Lane i: a[2i] + a[2i + 1].
static inline Ints add_pairs(Shorts a) {
    const Ints pairs = reinterpret_cast<Ints>(a);
    return (pairs << 16 >> 16) + (pairs >> 16);
}
/// The even bytes and the odd ones, as signed numbers.
static inline Shorts even(Bytes a) { return reinterpret_cast<Shorts>(a) << 8 >> 8; }
static inline Shorts odd(Bytes a) { return reinterpret_cast<Shorts>(a) >> 8; }
/// Two products of int8 fit in 16 bits, since activations are above -128.
static inline Ints sum_products(Bytes w, Bytes x) { return add_pairs(even(w) * even(x) + odd(w) * odd(x)); }
static inline Ints add_neighbours(Ints a, Ints b) {
    return __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
}

/// Both factors are signed: no zero point is needed, and codes below 64 are the same as signed bytes.
constexpr int wide_offset = 0;
static inline Codes wide(Codes c) { return c; }
template <bool is_wide>
static inline Sums dot(Sums acc, const Codes& w, const Codes& x) {
    const Ints low = add_neighbours(sum_products(w.v[0], x.v[0]), sum_products(w.v[1], x.v[1]));
    const Ints high = add_neighbours(sum_products(w.v[2], x.v[2]), sum_products(w.v[3], x.v[3]));
    return acc + add_neighbours(low, high);
}

constexpr int32_t sum_bias = 0;
static inline Sums zero_sums() { return Sums{}; }
static inline Sums start_quarters(const void* p) {
    Sums s;
    memcpy(&s, p, sizeof s);
    return s;
}
static inline Sums start_halves(const void* p) {
    int32_t a[2];
    memcpy(a, p, sizeof a);
    return Ints{a[0], 0, a[1], 0};
}
static inline Acc to_acc(Sums s) { return {__builtin_convertvector(s, Floats)}; }

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
constexpr int unit_blocks = 2;
static inline Scales load_blocks(const void* p) {
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
static inline Scales blocks_apart(const void* p, size_t stride) {
    return {{load_half(p), load_half(static_cast<const uint8_t*>(p) + stride)}};
}
static inline Scales powers_apart(const uint8_t* p, size_t stride) {
    const uint32_t bits[2] = {powers.bits[p[0]], powers.bits[p[stride]]};
    return load_blocks(bits);
}
static inline Scales eight_signed(uint64_t bytes, float d) {
    Scales s = {};
    for (int i = 0; i < 8; ++i) s.v[i] = d * static_cast<int8_t>(bytes >> 8 * i);
    return s;
}
static inline Scales eight_scales(const void* p) {
    uint32_t words[4];
    memcpy(words, p, sizeof words);
    const uint32_t a = words[1], b = words[2], c = words[3];
    const uint32_t six = 0x3f3f3f3f, four = 0x0f0f0f0f, upper = 0x30303030;
    const uint32_t codes[4] = {a & six, (c & four) | (a >> 2 & upper), b & six,
                               (c >> 4 & four) | (b >> 2 & upper)};
    const float d[2] = {load_half(p), load_half(static_cast<const uint8_t*>(p) + 2)};
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
    Shorts even, odd;
};
using PanelSums = Ints;
struct PanelPairs : NoPairs {};
constexpr int panel_vectors = 1;
constexpr bool few_in_registers = false;

static inline PanelCodes load_panel(const void* p) {
    Bytes a;
    memcpy(&a, p, sizeof a);
    return {even(a), odd(a)};
}
static inline PanelSums splat_sum(const void* p) {
    int32_t a;
    memcpy(&a, p, sizeof a);
    return Ints{a, a, a, a};
}
static inline PanelCodes splat_quad_codes(const void* p) {
    const Bytes a = reinterpret_cast<Bytes>(splat_sum(p));
    return {even(a), odd(a)};
}
template <bool is_wide>
static inline PanelSums dot(PanelSums acc, const PanelCodes& w, const PanelCodes& x) {
    return acc + add_pairs(w.even * x.even + w.odd * x.odd);
}
static inline Vec to_vec(PanelSums s) { return to_acc(s); }
using Words = Bytes;
static inline void load_words(const RowsAt& row, int at, Words (&to)[4]) {
    uint32_t words[4][lanes];
    for (int r = 0; r < lanes; ++r) {
        for (int i = 0; i < 4; ++i) memcpy(&words[i][r], row(r) + at + 4 * i, 4);
    }
    memcpy(to, words, sizeof words);
}
static inline Words load_word(const RowsAt& row, int at) {
    uint32_t words[lanes];
    for (int r = 0; r < lanes; ++r) memcpy(words + r, row(r) + at, 4);
    Words w;
    memcpy(&w, words, sizeof w);
    return w;
}
static inline void store_words(void* p, Words w) { memcpy(p, &w, sizeof w); }
static inline Words wide_words(Words w) { return w; }
static inline Words insert_high(Words low, Words high) { return low | high << 4; }
static inline Words load_table(const void* p) {
    Words w;
    memcpy(&w, p, sizeof w);
    return w;
}
/// Adds the steps from one table entry to the next where the code reaches them, in whole vectors: byte by
/// byte takes ten times as long.
static inline Words look_up(Words table, Words w) {
    Words found = Words{} + table[0];
    for (int i = 1; i < 16; ++i) {
        const uint8_t step = static_cast<uint8_t>(table[i] - table[i - 1]);
        found += reinterpret_cast<Words>(reinterpret_cast<SignedBytes>(w) >= static_cast<int8_t>(i)) & step;
    }
    return found;
}
static inline Codes look_up(Words table, Codes c) {
    for (Bytes& part : c.v) part = look_up(table, part);
    return c;
}
static inline Vec power_of(Words w) {
    uint8_t bytes[sizeof w];
    uint32_t bits[lanes];
    memcpy(bytes, &w, sizeof w);
    for (int r = 0; r < lanes; ++r) bits[r] = power_bits(bytes[4 * r]);
    Vec v;
    memcpy(&v, bits, sizeof v);
    return v;
}
static inline Vec byte_of(Words w, int i) {
    return {__builtin_convertvector(reinterpret_cast<Bits>(w) >> static_cast<uint32_t>(8 * i) & 255, Floats)};
}
static inline Vec signed_byte_of(Words w, int i) {
    return {__builtin_convertvector(reinterpret_cast<Ints>(w) << (24 - 8 * i) >> 24, Floats)};
}
static inline Vec half_of(Words w, int i) {
    return from_half(reinterpret_cast<Bits>(w) >> static_cast<uint32_t>(16 * i) & 0xffff);
}

struct ByElement {
    static constexpr int n = 1, side_by_side = 4, tokens = 1;

    template <bool is_wide>
    static PanelSums dot_quad(PanelSums acc, Words w, const void* p) {
        return SLIMRT_ISA::dot<is_wide>(acc, {even(w), odd(w)}, splat_quad_codes(p));
    }
};

struct Int16Products {
    static constexpr int64_t min_tokens = 0;  // f32 products are as fast
};

}  // namespace slimrt::cpu::SLIMRT_ISA
