// What dot_neon.h and dot_neon_dot.h share: everything but the dot products.
#pragma once

namespace slimrt::cpu::SLIMRT_ISA {

static inline float half_to_float(uint16_t h) {
    __fp16 half;
    memcpy(&half, &h, sizeof half);
    return static_cast<float>(half);
}
static inline void store(Half* p, Vec a) {
    const float16x4_t halves = vcvt_f16_f32(a.v);
    memcpy(p, &halves, sizeof halves);
}

struct Codes {
    uint8x16_t v[4];
};
using Acc = Vec;
constexpr bool joins_steps = true;
constexpr int dot_rows = 1;

static inline uint8x16_t load_bytes(const void* p) { return load_as<uint8x16_t>(p); }
static inline Codes load_halves(const void* p, const void* q) {
    const auto *a = static_cast<const uint8_t*>(p), *b = static_cast<const uint8_t*>(q);
    return {{load_bytes(a), load_bytes(a + 16), load_bytes(b), load_bytes(b + 16)}};
}
static inline Codes load_codes(const void* p) { return load_halves(p, static_cast<const uint8_t*>(p) + 32); }
static inline Codes load_twice(const void* p) { return load_halves(p, p); }
/// a >> shift & mask; no mask where the shift leaves no other bits.
static inline uint8x16_t field(uint8x16_t a, int shift, int mask) {
    const uint8x16_t shifted = a >> static_cast<uint8_t>(shift);
    return mask == 255 >> shift ? shifted : shifted & static_cast<uint8_t>(mask);
}
static inline Codes load_nibbles(const void* p, const void* q) {
    const uint8x16_t a = load_bytes(p), b = load_bytes(q);
    return {{field(a, 0, 15), field(a, 4, 15), field(b, 0, 15), field(b, 4, 15)}};
}
/// Fields that are not shifted yet, since insert_high() wants them at other positions.
struct Fields {
    Codes c;
    int shifts[2], mask;

    operator Codes() const { return {{at(0), at(1), at(2), at(3)}}; }
    uint8x16_t at(int i) const { return field(c.v[i], shifts[i / 2], mask); }
    /// Puts the fields into bits 4 and up of `low`, whose bits there are 0 or to be replaced.
    uint8x16_t insert_high(uint8x16_t low, int i) const {
        const int up = 4 - shifts[i / 2];
        const uint8x16_t moved =
            up > 0 ? c.v[i] << static_cast<uint8_t>(up) : c.v[i] >> static_cast<uint8_t>(-up);
        return vbslq_u8(vdupq_n_u8(static_cast<uint8_t>(mask << 4)), moved, low);
    }
};
static inline Fields fields(const Codes& c, int shift0, int shift1, int mask) {
    return {c, {shift0, shift1}, mask};
}
static inline Codes insert_high(const Codes& low, const Fields& high) {
    return {{high.insert_high(low.v[0], 0), high.insert_high(low.v[1], 1), high.insert_high(low.v[2], 2),
             high.insert_high(low.v[3], 3)}};
}

/// Both factors are signed: no zero point is needed, and codes below 64 are the same as signed bytes.
constexpr int wide_offset = 0;
static inline Codes wide(const Codes& c) { return c; }
static inline int8x16_t as_signed(uint8x16_t a) { return vreinterpretq_s8_u8(a); }

/// Sums start with this, as the integers of pack() do, so that to_vec() needs no integer conversion.
constexpr int32_t sum_bias = magic_bits;

struct Scales {
    Vec v[4];
};

static inline Scales operator*(const Scales& a, const Scales& b) {
    return {{a.v[0] * b.v[0], a.v[1] * b.v[1], a.v[2] * b.v[2], a.v[3] * b.v[3]}};
}
static inline void store(float* p, const Scales& s) { memcpy(p, s.v, sizeof s.v); }
static inline Scales load_eight(const void* p, const void* q) {
    const auto *a = static_cast<const float*>(p), *b = static_cast<const float*>(q);
    return {{load(a), load(a + 4), load(b), load(b + 4)}};
}
constexpr int unit_blocks = 4;
static inline Scales load_blocks(const void* p) { return {{load(static_cast<const float*>(p))}}; }
static inline Scales load_each_twice(const void* p) {
    const Scales once = load_eight(p, p);
    const auto low = [&](int i) { return Vec{vzip1q_f32(once.v[i].v, once.v[i].v)}; };
    const auto high = [&](int i) { return Vec{vzip2q_f32(once.v[i].v, once.v[i].v)}; };
    return {{low(0), high(0), low(1), high(1)}};
}
static inline Scales blocks_apart(const void* p, size_t stride) {
    const auto at = [&](size_t block) {
        return static_cast<uint64_t>(load_as<uint16_t>(static_cast<const char*>(p) + block * stride));
    };
    return {{{vcvt_f32_f16(vcreate_f16(at(0) | at(1) << 16 | at(2) << 32 | at(3) << 48))}}};
}
static inline Scales powers_apart(const uint8_t* p, size_t stride) {
    const uint32x4_t bits = {powers.bits[p[0]], powers.bits[p[stride]], powers.bits[p[2 * stride]],
                             powers.bits[p[3 * stride]]};
    return {{{vreinterpretq_f32_u32(bits)}}};
}
static inline Scales eight_signed(uint64_t bytes, float d) {
    const int16x8_t codes = vmovl_s8(vcreate_s8(bytes));
    return {{to_floats(vget_low_s16(codes)) * splat(d), to_floats(vget_high_s16(codes)) * splat(d)}};
}
/// The 6-bit scales (8), then minima (8), of Q4_K and Q5_K.
static inline uint8x16_t load_six_bits(uint8x16_t head) {
    const uint8x16_t to_low = {4, 5, 6, 7, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15};
    const uint8x16_t to_high = {255, 255, 255, 255, 4, 5, 6, 7, 255, 255, 255, 255, 8, 9, 10, 11};
    const int32x4_t shifts = {0, 0, 0, -4};
    const uint32x4_t masks = {0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f};
    const uint32x4_t low = vshlq_u32(vreinterpretq_u32_u8(vqtbl1q_u8(head, to_low)), shifts) & masks;
    const uint8x16_t high = vqtbl1q_u8(head, to_high) >> 2 & 0x30;
    return vreinterpretq_u8_u32(low) | high;
}
static inline Scales eight_scales(const void* p) {
    const uint8x16_t head = load_bytes(p), codes = load_six_bits(head);
    const float32x4_t d = vcvt_f32_f16(vreinterpret_f16_u8(vget_low_u8(head)));
    const uint16x8_t scales = vmovl_u8(vget_low_u8(codes)), minima = vmovl_high_u8(codes);
    const auto times = [&](uint16x4_t code, float factor) { return to_floats(code) * splat(factor); };
    const float scale = vgetq_lane_f32(d, 0), min = vgetq_lane_f32(d, 1);
    return {{times(vget_low_u16(scales), scale), times(vget_high_u16(scales), scale),
             times(vget_low_u16(minima), min), times(vget_high_u16(minima), min)}};
}
static inline Scales sixteen_scales(const void* p, float d) {
    const int8x16_t codes = load_as<int8x16_t>(p);
    const int16x8_t low = vmovl_s8(vget_low_s8(codes)), high = vmovl_high_s8(codes);
    const auto times = [&](int16x4_t code) { return to_floats(code) * splat(d); };
    return {{times(vget_low_s16(low)), times(vget_high_s16(low)), times(vget_low_s16(high)),
             times(vget_high_s16(high))}};
}
static inline Acc spread_halves(const Scales& s, int j) { return s.v[j / 2]; }
static inline Acc spread_quarters(const Scales& s, int j) { return s.v[j]; }
static inline Acc add_last_eight(Acc acc, const Scales& s) { return acc + s.v[2] + s.v[3]; }

using PanelCodes = int8x16_t;
using PanelSums = int32x4_t;
struct PanelPairs : NoPairs {};

static inline PanelCodes load_panel(const void* p) { return load_as<int8x16_t>(p); }
static inline PanelSums splat_sum(const void* p) { return vdupq_n_s32(load_as<int32_t>(p)); }
static inline PanelCodes splat_quad_codes(const void* p) { return vreinterpretq_s8_s32(splat_sum(p)); }
static inline Vec to_vec(PanelSums s) { return without_magic(s); }

using Words = uint8x16_t;
static inline void load_words(const RowsAt& row, int at, Words (&to)[4]) {
    Vec rows[lanes];
    for (int r = 0; r < lanes; ++r) rows[r].v = vreinterpretq_f32_u8(load_bytes(row(r) + at));
    transpose(rows);
    for (int i = 0; i < 4; ++i) to[i] = vreinterpretq_u8_f32(rows[i].v);
}
static inline Words load_word(const RowsAt& row, int at) {
    const auto one = [&](int r) { return load_as<uint32_t>(row(r) + at); };
    return vreinterpretq_u8_u32(uint32x4_t{one(0), one(1), one(2), one(3)});
}
static inline void store_words(void* p, Words w) { memcpy(p, &w, sizeof w); }
static inline Words wide_words(Words w) { return w; }
static inline Words insert_high(Words low, Words high) { return low | high << 4; }
static inline Words subtract_offset(Words w, int by) { return w - static_cast<uint8_t>(by); }
static inline Words load_table(const void* p) { return load_bytes(p); }
static inline Words look_up(Words table, Words w) { return vqtbl1q_u8(table, w); }
static inline Codes look_up(Words table, const Codes& c) {
    return {{look_up(table, c.v[0]), look_up(table, c.v[1]), look_up(table, c.v[2]), look_up(table, c.v[3])}};
}
static inline Vec power_of(Words w) {
    const int32x4_t e = vreinterpretq_s32_u8(w) & 255;
    return {vreinterpretq_f32_s32(vmaxq_s32((e - 1) << 23, (e + 1) << 21))};
}
static inline Vec byte_of(Words w, int i) {
    return {vcvtq_f32_u32(vreinterpretq_u32_u8(w) >> static_cast<uint32_t>(8 * i) & 255)};
}
static inline Vec signed_byte_of(Words w, int i) {
    const int32x4_t high =
        vreinterpretq_s32_u32(vreinterpretq_u32_u8(w) << static_cast<uint32_t>(24 - 8 * i));
    return {vcvtq_f32_s32(high >> 24)};
}
static inline Vec half_of(Words w, int i) {
    const uint32x4_t low = vreinterpretq_u32_u8(w) >> static_cast<uint32_t>(16 * i);
    return {vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(low)))};
}

/// Computes a here: g++ would otherwise keep its operands, and copy those.
static inline Vec computed(Vec a) {
    asm("" : "+w"(a.v));
    return a;
}

/// ByElement without the products of codes. Lanes of sums are rows.
struct AnyByElement {
    static constexpr int n = 4, side_by_side = 4, tokens = 1;
    using Floats = Vec;
    static PanelCodes of_words(Words w) { return as_signed(w); }
    /// Loaded each time: copying a register takes a slot of the vector pipes, which are the bottleneck.
    static PanelSums start() {
        static constexpr int32_t first[4] = {sum_bias, sum_bias, sum_bias, sum_bias};
        PanelSums sums;
        asm volatile("ldr %q0, %1" : "=w"(sums) : "m"(first));
        return sums;
    }
    static Floats load(const float* p) { return SLIMRT_ISA::load(p); }
    static Vec fma(Vec w, Floats x, int i, Vec sums) {
        return {i == 0   ? vfmaq_laneq_f32(sums.v, w.v, x.v, 0)
                : i == 1 ? vfmaq_laneq_f32(sums.v, w.v, x.v, 1)
                : i == 2 ? vfmaq_laneq_f32(sums.v, w.v, x.v, 2)
                         : vfmaq_laneq_f32(sums.v, w.v, x.v, 3)};
    }
    static Vec load_tokens(const uint8_t* p, size_t) { return splat(load_as<float>(p)); }
    static Vec of_token(Vec sums, Vec, int) { return sums; }
};

struct Int16Products {
    static constexpr int64_t min_tokens = 0;  // f32 products are as fast
};

}  // namespace slimrt::cpu::SLIMRT_ISA
