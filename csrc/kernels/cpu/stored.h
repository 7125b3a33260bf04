// The types of cache rows (core/dtype.h), a trait each, and with_stored(), which finds the trait of a type. A
// trait has
//   Code        what simd.h loads an element as; void: nibbles, to be unpacked with load_head()
//   scaled      whether a code is worth itself times a scale of f32, which lies beside the codes
//   write_row   one head of a row to its codes and scales
// and, if there are scales, which may belong to a channel of some rows as well as to a row,
//   Fit, fit    the scale of some elements, and what code() needs beside it; NaN where one is not finite
//   code        of an element, below 256
// For the units compiled once per ISA.
#pragma once

#include "core/dtype.h"
#include "kernels/cpu/blocks.h"
#include "kernels/cpu/linear.h"

namespace slimrt::cpu::SLIMRT_ISA {
namespace {

constexpr uint32_t kExponent = 0x7f800000;  // of a float: all ones in infinities and NaN

inline uint32_t bits_of(float x) { return u32_at(&x); }

inline float float_of(uint32_t u) { return f32_at(&u); }

inline bool finite(float x) { return (bits_of(x) & kExponent) != kExponent; }

/// Floats of a sort.
template <DType type, class Number>
struct StoredFloats {
    using Code = Number;
    static constexpr bool scaled = false, is_float = true;

    static void write_row(const float* x, int64_t n, uint8_t* to, uint8_t*) {
        narrow(static_cast<uint32_t>(type), x, n, to);
    }
};

/// Codes of zeros where the scale makes them NaN.
template <class Stored>
void write_scaled(const float* x, int64_t n, uint8_t* to, uint8_t* scale) {
    const auto fit = Stored::fit(x, n);
    memcpy(scale, &fit.scale, sizeof fit.scale);
    if (fit.scale != fit.scale) return void(memset(to, 0, static_cast<size_t>(n)));
    for (int64_t i = 0; i < n; ++i) to[i] = Stored::code(x[i], fit);
}

struct StoredQ8 {
    using Code = Int8;
    static constexpr bool scaled = true, is_float = false;
    struct Fit {
        float scale;
    };

    static Fit fit(const float* x, int64_t n) {
        const float high = largest(x, n);
        return {finite(high) ? high / 127 : __builtin_nanf("")};
    }
    static uint8_t code(float x, const Fit& fit) {
        const float code = fit.scale == 0 ? 0.0f : x / fit.scale;
        return static_cast<uint8_t>(nearest_even(code > 127 ? 127.0f : code < -127 ? -127.0f : code));
    }
    static void write_row(const float* x, int64_t n, uint8_t* to, uint8_t* scale) {
        write_scaled<StoredQ8>(x, n, to, scale);
    }
};

/// A finite float to a float of `mantissa` bits whose smallest normal number is 2^smallest: round to nearest
/// even. Larger exponents go on as if there were enough bits for them.
template <int mantissa, int smallest>
uint32_t to_fp8(uint32_t magnitude) {
    constexpr int drop = 23 - mantissa;
    const uint32_t normal = (magnitude + (1u << (drop - 1)) - 1 + (magnitude >> drop & 1)) >> drop;
    const float step = float_of(static_cast<uint32_t>(127 + mantissa - smallest) << 23);  // subnormal steps
    const bool small = magnitude < static_cast<uint32_t>(127 + smallest) << 23;
    const float few = small ? float_of(magnitude) * step : 0;
    return small ? static_cast<uint32_t>(nearest_even(few))
                 : normal - (static_cast<uint32_t>(126 + smallest) << mantissa);
}

struct StoredE4M3 {
    using Code = E4M3;
    static constexpr bool scaled = true, is_float = false;
    struct Fit {
        float scale, shrink;  // shrink: to below 2^8
    };

    static Fit fit(const float* x, int64_t n) {
        const float high = largest(x, n);
        if (!finite(high)) return {__builtin_nanf(""), 0};
        constexpr int kLowest = -100;  // of smaller rows the power would not be a float
        const int exponent = static_cast<int>(bits_of(high) >> 23) - 127;  // high < 2^(exponent + 1)
        const int power = exponent < kLowest ? kLowest : exponent;
        const float scale =
            power == 127 ? __builtin_inff() : float_of(static_cast<uint32_t>(power + 1 + 127) << 23);
        return {scale, float_of(static_cast<uint32_t>(7 - power + 127) << 23)};
    }
    static uint8_t code(float x, const Fit& fit) {
        const uint32_t u = bits_of(x * fit.shrink);
        return static_cast<uint8_t>(to_fp8<3, -6>(u & 0x7fffffff) | (u >> 24 & 0x80));
    }
    static void write_row(const float* x, int64_t n, uint8_t* to, uint8_t* scale) {
        write_scaled<StoredE4M3>(x, n, to, scale);
    }
};

struct StoredE5M2 {
    using Code = E5M2;
    static constexpr bool scaled = false, is_float = false;

    static void write_row(const float* x, int64_t n, uint8_t* to, uint8_t*) {
        constexpr uint32_t kInfinity = 0x7c, kNan = 0x7e;
        for (int64_t i = 0; i < n; ++i) {
            const uint32_t u = bits_of(x[i]), magnitude = u & 0x7fffffff;
            const uint32_t rounded = to_fp8<2, -14>(magnitude > 0x48000000 ? 0x48000000 : magnitude);
            const uint32_t code = magnitude > kExponent ? kNan : rounded > kInfinity ? kInfinity : rounded;
            to[i] = static_cast<uint8_t>(code | (u >> 24 & 0x80));
        }
    }
};

inline uint16_t half_of(float x) {
    Half halves[lanes];
    store(halves, splat(x));
    return halves[0].bits;
}

/// The largest half not above x, the smallest not below.
inline uint16_t half_below(float x) {
    const uint16_t h = half_of(x);
    if (!(half_to_float(h) > x)) return h;
    return static_cast<uint16_t>(h == 0 ? 0x8001 : h & 0x8000 ? h + 1 : h - 1);
}
inline uint16_t half_above(float x) { return half_below(-x) ^ 0x8000; }

/// Element i of a group of n is the low nibble of byte i, from the (n + 1) / 2-th on the high ones.
struct StoredQ4 {
    using Code = void;
    static constexpr bool scaled = false, is_float = false;
    static constexpr int64_t kGroup = 32;  // elements of a row with a scale of their own
    struct ScaleAndMin {
        Scale scale, min;
    };
    struct Fit {
        uint16_t stored[2];  // a ScaleAndMin
        float scale, min;
    };

    static Fit fit(const float* x, int64_t n) {
        if (!finite(largest(x, n))) return {{0x7e00, 0x7e00}, __builtin_nanf(""), 0};
        float low = x[0], high = x[0];
        for (int64_t i = 1; i < n; ++i) {
            low = x[i] < low ? x[i] : low;
            high = x[i] > high ? x[i] : high;
        }
        // Rounded outwards, so that every element lies between minimum and minimum + kMaxCode scales.
        const uint16_t below = half_below(low);
        const float min = half_to_float(below);
        const uint16_t above = half_above((high - min) / kMaxCode);
        return {{above, below}, half_to_float(above), min};
    }
    static uint8_t code(float x, const Fit& fit) {
        const float code = fit.scale > 0 ? (x - fit.min) / fit.scale : 0.0f;
        return static_cast<uint8_t>(nearest_even(code < kMaxCode ? code : float(kMaxCode)));
    }
    /// Column c of a row of dim: its byte, and the shift to its nibble.
    struct Nibble {
        int64_t byte;
        int shift;
    };
    static Nibble nibble(int64_t c, int64_t dim) {
        const int64_t first = c / kGroup * kGroup, size = dim - first < kGroup ? dim - first : kGroup;
        const int64_t half = (size + 1) / 2, i = c - first;
        return {first / 2 + (i < half ? i : i - half), i < half ? 0 : 4};
    }
    static void write_row(const float* x, int64_t n, uint8_t* to, uint8_t* scales) {
        memset(to, 0, static_cast<size_t>((n + 1) / 2));
        for (int64_t first = 0; first < n; first += kGroup, scales += sizeof(ScaleAndMin)) {
            const int64_t size = n - first < kGroup ? n - first : kGroup, half = (size + 1) / 2;
            const Fit f = fit(x + first, size);
            memcpy(scales, f.stored, sizeof f.stored);
            for (int64_t i = 0; i < size; ++i) {
                const uint8_t bits = code(x[first + i], f);
                to[first / 2 + i % half] |= static_cast<uint8_t>(i < half ? bits : bits << 4);
            }
        }
    }

  private:
    static constexpr int kMaxCode = 15;
};

template <class Stored>
constexpr bool has_scales = requires { typename Stored::Fit; };

/// fn(trait of a type of rows).
template <class Fn>
auto with_stored(uint32_t type, const Fn& fn) {
    switch (DType(type)) {
        case DType::F16:
            return fn(StoredFloats<DType::F16, Half>());
        case DType::BF16:
            return fn(StoredFloats<DType::BF16, Brain>());
        case DType::Q8:
            return fn(StoredQ8());
        case DType::FP8_E4M3:
            return fn(StoredE4M3());
        case DType::FP8_E5M2:
            return fn(StoredE5M2());
        case DType::Q4:
            return fn(StoredQ4());
        default:
            return fn(StoredFloats<DType::F32, float>());
    }
}

}  // namespace
}  // namespace slimrt::cpu::SLIMRT_ISA
