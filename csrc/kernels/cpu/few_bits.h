// Cache rows of 2, 3 and 4 bits: an f16 scale and an f16 minimum for each 32 columns of a row (a group), or
// for each channel of a block of rows. 4-bit codes share a byte with the code half a group further; codes of
// 2 and 3 bits are packed one after another from the lowest bit on. For the units compiled once per ISA.
#pragma once

#include "kernels/cpu/blocks.h"
#include "kernels/cpu/linear.h"

namespace slimrt::cpu::SLIMRT_ISA {

/// A column of a row of whole groups: the pointer type of attention_tiles.h for codes of few bits.
template <int bits>
struct CodeAt {
    const uint8_t* row;
    int64_t column;
    CodeAt operator+(int64_t n) const { return {row, column + n}; }
};
template <int bits>
static inline Vec load(CodeAt<bits> at) {
    return load_codes(FewBits<bits>(), at.row, at.column);
}
template <int bits>
static inline Vec load_part(CodeAt<bits> at, int64_t) {
    return load(at);  // rows are whole groups: there is no partial vector
}

/// V vectors of a row, from the start of a group.
template <int bits, int V>
static inline void load_row(CodeAt<bits> from, Vec (&to)[V]) {
    if constexpr (loads_groups && V * lanes == 32) {
        load_group(FewBits<bits>(), from.row + from.column / 32 * (4 * bits), to);
    } else {
#pragma GCC unroll 16
        for (int j = 0; j < V; ++j) to[j] = load(from + j * lanes);
    }
}

namespace {

constexpr uint32_t kExponent = 0x7f800000;  // of a float: all ones in infinities and NaN
inline uint32_t bits_of(float x) { return u32_at(&x); }
inline float float_of(uint32_t u) { return f32_at(&u); }
inline bool finite(float x) { return (bits_of(x) & kExponent) != kExponent; }

inline uint16_t half_of(float x) {
    Half halves[lanes];
    store(halves, splat(x));
    return halves[0].bits;
}

/// The largest f16 not above x, and the smallest not below.
inline uint16_t half_below(float x) {
    const uint16_t h = half_of(x);
    if (!(half_to_float(h) > x)) return h;
    return static_cast<uint16_t>(h == 0 ? 0x8001 : h & 0x8000 ? h + 1 : h - 1);
}
inline uint16_t half_above(float x) { return half_below(-x) ^ 0x8000; }

struct ScaleAndMin {
    Scale scale, min;
};

/// A trait of with_stored(), see stored.h.
template <int n_bits>
struct StoredFew {
    using Code = void;
    static constexpr bool scaled = false, is_float = false;
    static constexpr int bits = n_bits;
    // Elements that share a scale; the last group of a row may have fewer.
    static constexpr int64_t kGroup = 32;
    static constexpr int64_t kGroupBytes = kGroup / 8 * bits;
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
        // Both are rounded outwards, so that every element lies in [min, min + kMaxCode * scale].
        const uint16_t below = half_below(low);
        const float min = half_to_float(below);
        const uint16_t above = half_above((high - min) / kMaxCode);
        return {{above, below}, half_to_float(above), min};
    }
    static uint8_t code(float x, const Fit& fit) {
        const float code = fit.scale > 0 ? (x - fit.min) / fit.scale : 0.0f;
        return static_cast<uint8_t>(nearest_even(code < kMaxCode ? code : float(kMaxCode)));
    }

    /// Column c of a row of dim. put() expects zeros there.
    static void put(uint8_t* row, int64_t c, int64_t dim, uint8_t code) {
        const auto [byte, shift] = place(c, dim);
        row[byte] |= static_cast<uint8_t>(code << shift);
        if (shift + bits > 8) row[byte + 1] |= static_cast<uint8_t>(code >> (8 - shift));
    }
    static int get(const uint8_t* row, int64_t c, int64_t dim) {
        const auto [byte, shift] = place(c, dim);
        const int high = shift + bits > 8 ? row[byte + 1] << 8 : 0;
        return (row[byte] | high) >> shift & kMaxCode;
    }

    static void write_row(const float* x, int64_t n, uint8_t* to, uint8_t* scales) {
        memset(to, 0, static_cast<size_t>((n * bits + 7) / 8));
        for (int64_t first = 0; first < n; first += kGroup, scales += sizeof(ScaleAndMin)) {
            const int64_t end = n - first < kGroup ? n : first + kGroup;
            const Fit f = fit(x + first, end - first);
            memcpy(scales, f.stored, sizeof f.stored);
            for (int64_t i = first; i < end; ++i) put(to, i, n, code(x[i], f));
        }
    }

  private:
    static constexpr int kMaxCode = (1 << bits) - 1;
    struct Place {
        int64_t byte;
        int shift;
    };
    static Place place(int64_t c, int64_t dim) {
        if (bits < 4) return {c * bits / 8, static_cast<int>(c * bits % 8)};
        const int64_t first = c / kGroup * kGroup, size = dim - first < kGroup ? dim - first : kGroup;
        const int64_t half = (size + 1) / 2, i = c - first;
        return {first / 2 + (i < half ? i : i - half), i < half ? 0 : 4};
    }
};

/// Rows of whole groups, `stride` bytes apart, whose elements load as codes.
template <int bits>
struct CodeRows {
    static constexpr bool packed = false, is_int8 = false;
    const uint8_t* data;
    size_t stride;
    int64_t column = 0;

    CodeAt<bits> row(int64_t i) const { return {data + i * static_cast<int64_t>(stride), column}; }
    CodeRows at(int64_t i, int64_t more) const {
        return {data + i * static_cast<int64_t>(stride), stride, column + more};
    }
};
template <int bits>
inline CodeRows<bits> rows_from(CodeAt<bits> row, size_t stride) {
    return {row.row, stride, row.column};
}

}  // namespace
}  // namespace slimrt::cpu::SLIMRT_ISA
