// Planes of a cache with random rows, and what these hold in float64; for absorbed_test.cpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/backend.h"

namespace absorbed_test {

using namespace slimrt;
inline constexpr int kBlock = 32;
inline std::mt19937 chance(5);

inline double normal() { return std::normal_distribution<double>()(chance); }
inline int below(int n) { return int(chance() % unsigned(n)); }

inline double f16_number(uint16_t bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const double size = exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
    return bits & 0x8000 ? -size : size;
}
inline uint16_t f16_of(double x) {  // nearest; normal numbers only
    int exponent;
    const double part = std::frexp(std::fabs(x), &exponent);
    if (exponent < -13) return 0;
    const long mantissa = std::lround(std::ldexp(part, 11)) - 1024;
    return uint16_t((x < 0 ? 0x8000 : 0) | (((exponent + 14) << 10) + mantissa));
}
inline double bf16_number(uint16_t bits) {
    const uint32_t word = uint32_t{bits} << 16;
    float x;
    std::memcpy(&x, &word, 4);
    return x;
}

/// Of a type of few bits.
inline int few_bits(DType type) { return type == DType::Q4 ? 4 : type == DType::Q3 ? 3 : 2; }

/// A plane of several sequences' rows in shuffled blocks; what is in no row is NaN.
struct Plane {
    Rows rows;
    HeadBytes head;
    std::vector<uint8_t> memory;
    uint8_t* base;

    Plane(DType type, int width, int heads, int blocks)
        : head(head_bytes(type, width / heads)), memory(head.total() * heads * kBlock * blocks + 128, 0xff) {
        base = memory.data() + (128 - reinterpret_cast<uintptr_t>(memory.data()) % 128) % 128;
        rows = {.base = reinterpret_cast<std::byte*>(base),
                .dtype = type,
                .width = width,
                .heads = heads,
                .block_stride = head.total() * heads * kBlock,
                .block_tokens = kBlock};
    }
    uint8_t* data(const int32_t* table, int64_t at, int of) const {
        return base + table[at / kBlock] * rows.block_stride + of * head.total() * kBlock +
               at % kBlock * head.elements;
    }
    uint8_t* scales(const int32_t* table, int64_t at, int of) const {
        return base + table[at / kBlock] * rows.block_stride + (of * head.total() + head.elements) * kBlock +
               at % kBlock * head.scales;
    }
    /// Random numbers into a row, and what it then holds.
    std::vector<double> fill(const int32_t* table, int64_t at, double size) {
        std::vector<double> out;
        for (int of = 0; of < rows.heads; ++of) {
            uint8_t *to = data(table, at, of), *scale = scales(table, at, of);
            const int n = rows.head_dim();
            const float step = float(size * (0.5 + 0.01 * below(100)) / 50);
            const float power = std::ldexp(1.0f, below(3) + int(std::log2(size)));
            if (rows.dtype == DType::Q8) std::memcpy(scale, &step, 4);
            if (rows.dtype == DType::FP8_E4M3) std::memcpy(scale, &power, 4);
            for (int i = 0; i < n; ++i) {
                const uint16_t half = f16_of(size * normal());
                const float single = float(size * normal());
                const uint8_t byte = uint8_t(below(256));
                uint32_t word;
                std::memcpy(&word, &single, 4);
                const uint16_t brain = uint16_t(word >> 16);
                switch (rows.dtype) {
                    case DType::F16:
                        std::memcpy(to + 2 * i, &half, 2);
                        out.push_back(f16_number(half));
                        break;
                    case DType::BF16:
                        std::memcpy(to + 2 * i, &brain, 2);
                        out.push_back(bf16_number(brain));
                        break;
                    case DType::Q8:
                        to[i] = byte;
                        out.push_back(int8_t(byte) * double(step));
                        break;
                    case DType::FP8_E4M3: {
                        const uint8_t code = (byte & 0x7f) == 0x7f ? 3 : byte;
                        const int e = code >> 3 & 15, m = code & 7;
                        const double x = e ? std::ldexp(8 + m, e - 10) : std::ldexp(m, -9);
                        to[i] = code;
                        out.push_back((code & 128 ? -x : x) * power / 256);
                        break;
                    }
                    case DType::FP8_E5M2: {
                        const uint8_t code = uint8_t(half >> 8);
                        to[i] = code;
                        out.push_back(f16_number(uint16_t(code << 8)));
                        break;
                    }
                    default: {  // of few bits; of 4 half a group on in the same bytes
                        const int bits = few_bits(rows.dtype), code = byte & ((1 << bits) - 1);
                        const int group = i / 32, in = i % 32,
                                  half_of = (std::min(32, n - group * 32) + 1) / 2;
                        const int bit = bits < 4       ? i * bits
                                        : in < half_of ? group * 128 + in * 8
                                                       : group * 128 + (in - half_of) * 8 + 4;
                        const uint16_t scale_bits = f16_of(size / 5), least = f16_of(-size * 1.5);
                        std::memcpy(scale + 4 * group, &scale_bits, 2);
                        std::memcpy(scale + 4 * group + 2, &least, 2);
                        if (i == 0) std::memset(to, 0, head.elements);
                        to[bit / 8] |= uint8_t(code << bit % 8);
                        if (bit % 8 + bits > 8) to[bit / 8 + 1] |= uint8_t(code >> (8 - bit % 8));
                        out.push_back(f16_number(scale_bits) * code + f16_number(least));
                        break;
                    }
                    case DType::F32:
                        std::memcpy(to + 4 * i, &single, 4);
                        out.push_back(single);
                }
            }
        }
        return out;
    }
};

}  // namespace absorbed_test
