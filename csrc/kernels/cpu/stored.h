// The element types of cache rows (core/dtype.h), a trait each, and with_stored(), which finds the trait of a
// type. For the units compiled once per ISA. A trait has
//   Code        the type that simd.h loads an element as; void: of 2 to 4 bits, see few_bits.h
//   scaled      whether an element is its code times an f32 scale of its row, stored behind the codes
//   write_row   quantises one head of a row to codes and scales
// and, if there are scales, which may also be one for each channel of a block of rows,
//   Fit, fit    the scale of some elements and what code() needs beside it; NaN if one is not finite
//   code        the code of an element, below 256
#pragma once

#include "core/dtype.h"
#include "kernels/cpu/few_bits.h"
#include "kernels/cpu/linear.h"

namespace slimrt::cpu::SLIMRT_ISA {
namespace {

/// F32, F16 and BF16.
template <DType type, class Number>
struct StoredFloats {
    using Code = Number;
    static constexpr bool scaled = false, is_float = true;

    static void write_row(const float* x, int64_t n, uint8_t* to, uint8_t*) {
        narrow(static_cast<uint32_t>(type), x, n, to);
    }
};

/// Quantises n elements; the codes are 0 where the scale is NaN.
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

/// The magnitude of a finite float, rounded to nearest even, as a float of `mantissa` bits whose smallest
/// normal number is 2^smallest. Exponents that are too large are not clamped here.
template <int mantissa, int smallest>
uint32_t to_fp8(uint32_t magnitude) {
    constexpr int drop = 23 - mantissa;
    const uint32_t normal = (magnitude + (1u << (drop - 1)) - 1 + (magnitude >> drop & 1)) >> drop;
    // 1 / subnormal spacing.
    const float step = float_of(static_cast<uint32_t>(127 + mantissa - smallest) << 23);
    const bool small = magnitude < static_cast<uint32_t>(127 + smallest) << 23;
    const float few = small ? float_of(magnitude) * step : 0;
    return small ? static_cast<uint32_t>(nearest_even(few))
                 : normal - (static_cast<uint32_t>(126 + smallest) << mantissa);
}

struct StoredE4M3 {
    using Code = E4M3;
    static constexpr bool scaled = true, is_float = false;
    struct Fit {
        float scale, shrink;  // shrink: maps the row to below 2^8
    };

    static Fit fit(const float* x, int64_t n) {
        const float high = largest(x, n);
        if (!finite(high)) return {__builtin_nanf(""), 0};
        constexpr int kLowest = -100;  // below it the inverse power would overflow
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

template <class Stored>
constexpr bool has_scales = requires { typename Stored::Fit; };

/// Returns fn(the trait of the type).
template <class Fn>
auto with_stored(uint32_t type, const Fn& fn) {
    switch (DType(type)) {
        case DType::F16:
            return fn(StoredFloats<DType::F16, Half>());
        case DType::BF16:
            return fn(StoredFloats<DType::BF16, BFloat16>());
        case DType::Q8:
            return fn(StoredQ8());
        case DType::FP8_E4M3:
            return fn(StoredE4M3());
        case DType::FP8_E5M2:
            return fn(StoredE5M2());
        case DType::Q4:
            return fn(StoredFew<4>());
        case DType::Q3:
            return fn(StoredFew<3>());
        case DType::Q2:
            return fn(StoredFew<2>());
        default:
            return fn(StoredFloats<DType::F32, float>());
    }
}

}  // namespace
}  // namespace slimrt::cpu::SLIMRT_ISA
