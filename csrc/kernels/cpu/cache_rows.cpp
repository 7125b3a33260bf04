// Heads of cache rows to and from their stored types (core/dtype.h). Compiled once per ISA.
#include "core/dtype.h"
#include "kernels/cpu/blocks.h"
#include "kernels/cpu/linear.h"
#include "kernels/cpu/rows.h"

namespace slimrt::cpu::SLIMRT_ISA {
namespace {

constexpr uint32_t kExponent = 0x7f800000;  // of a float: all ones in infinities and NaN
constexpr int64_t kGroup = 32;              // elements of Q4 with a scale of their own

uint32_t bits_of(float x) { return u32_at(&x); }

float float_of(uint32_t u) { return f32_at(&u); }

/// The largest magnitude; NaN or infinity if there is one.
float largest(const float* x, int64_t n) {
    uint32_t high = 0;
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t u = bits_of(x[i]) & 0x7fffffff;
        high = u > high ? u : high;
    }
    return float_of(high);
}

bool finite(float x) { return (bits_of(x) & kExponent) != kExponent; }

/// For |x| < 2^22.
int32_t nearest_even(float x) {
    const float magic = 0x1.8p23f;
    return static_cast<int32_t>(bits_of(x + magic) - bits_of(magic));
}

/// Codes of zeros whose scale makes them NaN.
void store_nan(int64_t bytes, void* to, void* scale) {
    const float nan = __builtin_nanf("");
    memset(to, 0, static_cast<size_t>(bytes));
    memcpy(scale, &nan, sizeof nan);
}

void store_q8(const float* x, int64_t n, int8_t* to, void* scale_to) {
    const float high = largest(x, n);
    if (!finite(high)) return store_nan(n, to, scale_to);
    const float scale = high / 127;
    memcpy(scale_to, &scale, sizeof scale);
    for (int64_t i = 0; i < n; ++i) {
        const float code = scale == 0 ? 0.0f : x[i] / scale;
        to[i] = static_cast<int8_t>(nearest_even(code > 127 ? 127.0f : code < -127 ? -127.0f : code));
    }
}

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

void store_e4m3(const float* x, int64_t n, uint8_t* to, void* scale_to) {
    const float high = largest(x, n);
    if (!finite(high)) return store_nan(n, to, scale_to);
    constexpr int kLowest = -100;  // of smaller rows the power would not be a float
    const int exponent = static_cast<int>(bits_of(high) >> 23) - 127;  // high < 2^(exponent + 1)
    const int power = exponent < kLowest ? kLowest : exponent;
    const float scale =
        power == 127 ? __builtin_inff() : float_of(static_cast<uint32_t>(power + 1 + 127) << 23);
    memcpy(scale_to, &scale, sizeof scale);
    const float shrink = float_of(static_cast<uint32_t>(7 - power + 127) << 23);  // to below 2^8
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t u = bits_of(x[i] * shrink);
        to[i] = static_cast<uint8_t>(to_fp8<3, -6>(u & 0x7fffffff) | (u >> 24 & 0x80));
    }
}

void store_e5m2(const float* x, int64_t n, uint8_t* to) {
    constexpr uint32_t kInfinity = 0x7c, kNan = 0x7e;
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t u = bits_of(x[i]), magnitude = u & 0x7fffffff;
        const uint32_t rounded = to_fp8<2, -14>(magnitude > 0x48000000 ? 0x48000000 : magnitude);
        const uint32_t code = magnitude > kExponent ? kNan : rounded > kInfinity ? kInfinity : rounded;
        to[i] = static_cast<uint8_t>(code | (u >> 24 & 0x80));
    }
}

uint16_t half_of(float x) {
    Half halves[lanes];
    store(halves, splat(x));
    return halves[0].bits;
}

/// The largest half not above x, the smallest not below.
uint16_t half_below(float x) {
    const uint16_t h = half_of(x);
    if (!(half_to_float(h) > x)) return h;
    return static_cast<uint16_t>(h == 0 ? 0x8001 : h & 0x8000 ? h + 1 : h - 1);
}
uint16_t half_above(float x) { return half_below(-x) ^ 0x8000; }

void store_q4_group(const float* x, int64_t n, uint8_t* to, uint16_t* scale_and_min) {
    constexpr int kMost = 15;
    const int64_t half = (n + 1) / 2;
    memset(to, 0, static_cast<size_t>(half));
    if (!finite(largest(x, n))) {
        scale_and_min[0] = scale_and_min[1] = 0x7e00;
        return;
    }
    float low = x[0], high = x[0];
    for (int64_t i = 1; i < n; ++i) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
    }
    // Rounded outwards, so that every element lies between minimum and minimum + 15 scales.
    scale_and_min[1] = half_below(low);
    const float min = half_to_float(scale_and_min[1]);
    scale_and_min[0] = half_above((high - min) / kMost);
    const float scale = half_to_float(scale_and_min[0]);
    for (int64_t i = 0; i < n; ++i) {
        const float code = scale > 0 ? (x[i] - min) / scale : 0.0f;
        const int bounded = nearest_even(code < kMost ? code : float(kMost));
        to[i % half] |= static_cast<uint8_t>(i < half ? bounded : bounded << 4);
    }
}

void store_q4(const float* x, int64_t n, uint8_t* to, uint8_t* scales) {
    for (int64_t i = 0; i < n; i += kGroup) {
        uint16_t scale_and_min[2];
        store_q4_group(x + i, n - i < kGroup ? n - i : kGroup, to + i / 2, scale_and_min);
        memcpy(scales + i / kGroup * 4, scale_and_min, 4);
    }
}

struct ScaleAndMin {
    Scale scale, min;
};

/// One whole group of each of n_rows rows, whose groups have their scales one after another.
void load_q4_groups(const uint8_t* from, size_t from_stride, const ScaleAndMin* scales, int64_t groups,
                    int64_t n_rows, float* to, size_t to_stride) {
    for (int64_t r = 0; r < n_rows; ++r, from += from_stride, scales += groups, to += to_stride) {
        const Vec scale = splat(scales->scale), min = splat(scales->min);
        for (int j = 0; j < 16; j += lanes) {
            store(to + j, fma(low_nibbles(from + j), scale, min));
            store(to + j + 16, fma(high_nibbles(from + j), scale, min));
        }
    }
}

/// Elements [first, end) of a group of `size`.
void load_q4_part(const uint8_t* from, const ScaleAndMin& of, int64_t size, int64_t first, int64_t end,
                  float* to) {
    const float scale = of.scale, min = of.min;
    const int64_t half = (size + 1) / 2;
    for (int64_t j = first; j < end; ++j) {
        const int code = j < half ? from[j] & 15 : from[j - half] >> 4;
        *to++ = static_cast<float>(code) * scale + min;
    }
}

void load_q4(const uint8_t* from, size_t from_stride, const ScaleAndMin* scales, int64_t n_rows, int64_t dim,
             int64_t first, int64_t n, float* to, size_t to_stride) {
    const int64_t groups = (dim + kGroup - 1) / kGroup, end = first + n;
    for (int64_t i = first / kGroup, column = i * kGroup; column < end; ++i, column += kGroup) {
        const uint8_t* const codes = from + column / 2;
        if (column >= first && column + kGroup <= end) {
            load_q4_groups(codes, from_stride, scales + i, groups, n_rows, to + (column - first), to_stride);
            continue;
        }
        const int64_t size = dim - column < kGroup ? dim - column : kGroup;
        const int64_t begin = column < first ? first - column : 0;
        const int64_t stop = end - column < size ? end - column : size;
        for (int64_t r = 0; r < n_rows; ++r)
            load_q4_part(codes + r * from_stride, scales[r * groups + i], size, begin, stop,
                         to + r * to_stride + (column + begin - first));
    }
}

template <class Stored>
void load_scaled(const void* from, float scale, int64_t n, float* to) {
    const Stored* p = static_cast<const Stored*>(from);
    int64_t i = 0;
    for (; i + lanes <= n; i += lanes) store(to + i, load(p + i) * splat(scale));
    if (i < n) store_part(to + i, load_part(p + i, n - i) * splat(scale), n - i);
}

void load_one(DType type, const void* from, const void* scales, int64_t dim, float* to) {
    switch (type) {
        case DType::Q8:
            return load_scaled<Int8>(from, f32_at(scales), dim, to);
        case DType::FP8_E4M3:
            return load_scaled<E4M3>(from, f32_at(scales), dim, to);
        case DType::FP8_E5M2:
            return load_scaled<E5M2>(from, 1, dim, to);
        default:
            return unpack(static_cast<uint32_t>(type), from, dim, to);
    }
}

}  // namespace

void store_head(uint32_t type, const float* from, int64_t dim, void* to, void* scales) {
    switch (DType(type)) {
        case DType::Q8:
            return store_q8(from, dim, static_cast<int8_t*>(to), scales);
        case DType::FP8_E4M3:
            return store_e4m3(from, dim, static_cast<uint8_t*>(to), scales);
        case DType::FP8_E5M2:
            return store_e5m2(from, dim, static_cast<uint8_t*>(to));
        case DType::Q4:
            return store_q4(from, dim, static_cast<uint8_t*>(to), static_cast<uint8_t*>(scales));
        default:
            return narrow(type, from, dim, to);
    }
}

void load_head(uint32_t type, const void* from, size_t from_stride, const void* scales, int64_t n_rows,
               int64_t dim, int64_t first, int64_t n, float* to, size_t to_stride) {
    if (DType(type) == DType::Q4)
        return load_q4(static_cast<const uint8_t*>(from), from_stride,
                       static_cast<const ScaleAndMin*>(scales), n_rows, dim, first, n, to, to_stride);
    const size_t scales_stride = head_bytes(DType(type), dim).scales;
    const char* row = static_cast<const char*>(from) + head_bytes(DType(type), first).elements;
    const char* scale = static_cast<const char*>(scales);
    for (int64_t i = 0; i < n_rows; ++i) {
        load_one(DType(type), row, scale, n, to);
        row += from_stride;
        scale += scales_stride;
        to += to_stride;
    }
}

}  // namespace slimrt::cpu::SLIMRT_ISA
