// Fragments of mma from rows in shared memory as they are stored. Where codes have a byte or less, a lane
// reads four neighbouring columns, in few bits a unit (RowFew), in place of two and two. Queries are laid out
// to match (query_column), and result columns are where value_column() says.
#pragma once

#include "kernels/cuda/attention_view.h"
#include "kernels/cuda/ptx.cuh"

namespace slimrt::cuda {

/// How rows of a type are read; f32 rows are not. nibbles: 4 bits; stream: fewer.
enum class Reading { f32, f16, bf16, bytes, nibbles, stream };

__host__ __device__ constexpr Reading reading_of(DType type) {
    return type == DType::F32    ? Reading::f32
           : type == DType::F16  ? Reading::f16
           : type == DType::BF16 ? Reading::bf16
           : type == DType::Q4   ? Reading::nibbles
           : type == DType::Q3   ? Reading::stream
           : type == DType::Q2   ? Reading::stream
                                 : Reading::bytes;
}
__host__ __device__ constexpr bool few_bits(Reading reading) {
    return reading == Reading::nibbles || reading == Reading::stream;
}

/// The column, in a row of whole groups, of pair `pair` of a unit; half: 0, the low half of the pair, or 1.
/// See load_unit().
__device__ inline int unit_column(Reading reading, int unit, int pair, int half) {
    if (reading == Reading::nibbles)
        return unit / 4 * 32 + unit % 4 * 4 + pair % 2 * 16 + pair / 2 + half * 2;
    return unit * 8 + pair + half * 4;
}
/// The column at k-index 2 * member + i of a step's first or second eight.
__device__ inline int query_column(Reading reading, int step, int member, int second, int i) {
    if (few_bits(reading)) return unit_column(reading, step / 2 * 4 + member, step % 2 * 2 + second, i);
    const bool whole = reading == Reading::f16 || reading == Reading::bf16;
    return 16 * step + (whole ? 2 * member + 8 * second : 4 * member + 2 * second) + i;
}
/// The column of a row whose sum is column c of tile n.
__device__ inline int value_column(Reading reading, int n, int c) {
    if (reading == Reading::bytes) return n / 4 * 32 + 4 * c + n % 4;
    if (few_bits(reading)) return unit_column(reading, n / 8 * 8 + c, n % 4, n / 4 % 2);
    return 8 * n + c;
}

/// Codes of one byte as f16, two at a time: bytes 0 and 1 of `codes` or, with `high`, 2 and 3. Without their
/// scale; see e4m3_to_f16().
template <class Row>
__device__ inline uint32_t code_pair(uint32_t codes, bool high) {
    if constexpr (Row::kType == DType::Q8) {
        const uint32_t raised = __byte_perm(codes ^ 0x80808080u, 0x64646464u, high ? 0x4342 : 0x4140);
        return add_f16x2(raised, 0xe480e480u);  // minus 1024 + 128
    } else {
        const uint32_t e5m2 = __byte_perm(codes, 0, high ? 0x3424 : 0x1404);
        if constexpr (Row::kType == DType::FP8_E5M2) return e5m2;
        return (e5m2 & 0x80008000u) | (e5m2 >> 1 & 0x3f803f80u);
    }
}

/// The codes of a unit of a row as four pairs: pair i has a code in each half, from bit i * kBits on.
template <class Row>
__device__ inline uint32_t load_unit(const unsigned char* row, int unit) {
    const unsigned char* const from = row + unit * Row::kBits;
    if constexpr (Row::kBits == 4) {
        return *reinterpret_cast<const uint32_t*>(from);
    } else if constexpr (Row::kBits == 3) {
        const uint32_t codes = from[0] | from[1] << 8 | from[2] << 16;
        return (codes & 0xfff) | (codes & 0xfff000) << 4;
    } else {
        return from[0] | from[1] << 16;
    }
}
/// Pair `i` as numbers, with the scales and minima of both codes.
template <class Row>
__device__ inline uint32_t unit_pair(uint32_t unit, int i, uint32_t scales, uint32_t minima) {
    constexpr uint32_t kBoth = 0x00010001;
    const uint32_t raised = (unit >> i * Row::kBits & Row::kMaxCode * kBoth) | 0x64006400;  // 1024 + code
    return multiply_add_f16x2(add_f16x2(raised, 0xe400e400u), scales, minima);
}
/// The low halves of two words, or the high ones.
__device__ inline uint32_t low_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x5410); }
__device__ inline uint32_t high_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x7632); }

template <bool bf16>
__device__ inline void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (bf16)
        multiply_add_bf16(d, a, b0, b1);
    else
        multiply_add_f16(d, a, b0, b1);
}

/// Splits a pair of floats into two pairs of 16-bit numbers that add up to it.
__device__ inline void split_pair(bool bf16, float x, float y, uint32_t& high, uint32_t& low) {
    if (bf16) {
        high = pair_bf16(x, y);
        low = pair_bf16(x - from_bf16(high & 0xffff), y - from_bf16(high >> 16));
    } else {
        high = pair_f16(x, y);
        low = pair_f16(x - from_f16(high & 0xffff), y - from_f16(high >> 16));
    }
}

/// 32 rows in shared memory, `stride` bytes apart (an odd multiple of 16, so that there are no bank
/// conflicts), then their scales.
struct CodeTile {
    const unsigned char* rows;
    int stride;
    int groups;  // of a row, in few bits
    __device__ const unsigned char* scales() const { return rows + kBlockRows * stride; }
};

__device__ inline void load_step(uint32_t (&a)[4], const uint4* queries, int step) {
    const uint4 q = queries[step * 32 + threadIdx.x % 32];
    a[0] = q.x, a[1] = q.y, a[2] = q.z, a[3] = q.w;
}

/// s[i] += queries [16] times rows [8 i, 8 i + 8), in `steps` of 16 columns.
template <bool bf16>
__device__ inline void score_halves(const CodeTile& tile, const uint4* queries, int steps, float (&s)[4][4]) {
    const int lane = threadIdx.x % 32;
    const unsigned char* const row = tile.rows + (lane / 16 * 8 + lane % 8) * tile.stride + lane / 8 % 2 * 16;
#pragma unroll 4
    for (int step = 0; step < steps; ++step) {
        uint32_t a[4], b[4];
        load_step(a, queries, step);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            load_matrices(b, row + half * 16 * tile.stride + step * 32);
            multiply_add<bf16>(s[2 * half], a, b[0], b[1]);
            multiply_add<bf16>(s[2 * half + 1], a, b[2], b[3]);
        }
    }
}

template <class Row>
__device__ inline void score_bytes(const CodeTile& tile, const uint4* queries, int steps, float (&s)[4][4]) {
    const unsigned char* const row = tile.rows + threadIdx.x % 32 * tile.stride;
#pragma unroll 4
    for (int step = 0; step < steps; ++step) {
        uint32_t a[4], codes[4];
        load_step(a, queries, step);
        load_matrices(codes, row + step * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            multiply_add_f16(s[i], a, code_pair<Row>(codes[i], false), code_pair<Row>(codes[i], true));
    }
}

/// Scales and minima of the four pairs of a unit.
struct UnitScales {
    uint32_t scale[4], minimum[4];

    /// A group's scale and minimum.
    __device__ void set(uint32_t of_group) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            scale[i] = low_halves(of_group, of_group);
            minimum[i] = high_halves(of_group, of_group);
        }
    }
    /// Those of channels.
    __device__ void set(const uint32_t* channels, Reading reading, int unit) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t low = channels[unit_column(reading, unit, i, 0)];
            const uint32_t high = channels[unit_column(reading, unit, i, 1)];
            scale[i] = low_halves(low, high);
            minimum[i] = high_halves(low, high);
        }
    }
};

template <class Row, bool channels>
__device__ inline void score_units(const CodeTile& tile, const uint4* queries, int steps, float (&s)[4][4]) {
    const int lane = threadIdx.x % 32, member = lane % 4;
    const unsigned char* const row = tile.rows + lane / 4 * tile.stride;
    const uint32_t* const scales = reinterpret_cast<const uint32_t*>(tile.scales());
#pragma unroll 2
    for (int group = 0; group < steps / 2; ++group) {
        const int unit = 4 * group + member;
        uint32_t low[4], high[4];
        load_step(low, queries, 2 * group);
        load_step(high, queries, 2 * group + 1);
        UnitScales of;
        if constexpr (channels) of.set(scales, reading_of(Row::kType), unit);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t codes = load_unit<Row>(row + 8 * i * tile.stride, unit);
            if constexpr (!channels) of.set(scales[(8 * i + lane / 4) * tile.groups + group]);
            const auto pair = [&](int k) { return unit_pair<Row>(codes, k, of.scale[k], of.minimum[k]); };
            multiply_add_f16(s[i], low, pair(0), pair(1));
            multiply_add_f16(s[i], high, pair(2), pair(3));
        }
    }
}

/// sums[n] += weights [16] times columns of 16 rows from `first` on; rows have `columns` columns.
template <bool bf16, int kTiles>
__device__ inline void add_halves(const CodeTile& tile, int first, int columns, const uint32_t (&weights)[4],
                                  float (&sums)[kTiles][4]) {
    const int lane = threadIdx.x % 32;
    const unsigned char* const row =
        tile.rows + (first + lane / 8 % 2 * 8 + lane % 8) * tile.stride + lane / 16 * 16;
#pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
        if (8 * n >= columns) break;
        uint32_t b[4];
        load_matrices_transposed(b, row + n * 16);
        multiply_add<bf16>(sums[n], weights, b[0], b[1]);
        multiply_add<bf16>(sums[n + 1], weights, b[2], b[3]);
    }
}

/// A word of each of the four rows whose weights this lane's products have.
struct RowWords {
    uint32_t rows[4];
    __device__ RowWords(const unsigned char* row, int stride, bool wanted) {
        const auto word = [&](int i) {
            return wanted ? *reinterpret_cast<const uint32_t*>(row + i * stride) : 0;
        };
        rows[0] = word(0), rows[1] = word(1), rows[2] = word(8), rows[3] = word(9);
    }
    /// Bytes 2 * upper and 2 * upper + 1 of rows 2 second and 2 second + 1, alternating.
    __device__ uint32_t mixed(int second, bool upper) const {
        return __byte_perm(rows[2 * second], rows[2 * second + 1], upper ? 0x7362 : 0x5140);
    }
};

template <class Row, int kTiles>
__device__ inline void add_bytes(const CodeTile& tile, int first, int columns, const uint32_t (&weights)[4],
                                 float (&sums)[kTiles][4]) {
    const int lane = threadIdx.x % 32, group = lane / 4, member = lane % 4;
    const unsigned char* const row = tile.rows + (first + 2 * member) * tile.stride + 4 * group;
#pragma unroll
    for (int n = 0; n < kTiles; n += 4) {
        if (8 * n >= columns) break;
        const RowWords words(row + 8 * n, tile.stride, 8 * n + 4 * group < columns);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            multiply_add_f16(sums[n + i], weights, code_pair<Row>(words.mixed(0, i / 2), i % 2),
                             code_pair<Row>(words.mixed(1, i / 2), i % 2));
        }
    }
}

template <class Row, int kTiles>
__device__ inline void add_units(const CodeTile& tile, int first, int columns, const uint32_t (&weights)[4],
                                 float (&sums)[kTiles][4]) {
    const int lane = threadIdx.x % 32, own = first + 2 * (lane % 4);
    const unsigned char* const row = tile.rows + own * tile.stride;
    const uint32_t* const scales = reinterpret_cast<const uint32_t*>(tile.scales()) + own * tile.groups;
#pragma unroll
    for (int n = 0; n < kTiles; n += 8) {
        if (8 * n >= columns) break;
        const int unit = n + lane / 4, group = unit / 4;
        uint32_t codes[2][2] = {}, scale[2] = {}, minimum[2] = {};  // [half][pair of rows]
        if (group < tile.groups) {
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const unsigned char* const at = row + 8 * k * tile.stride;
                const uint32_t a = load_unit<Row>(at, unit), b = load_unit<Row>(at + tile.stride, unit);
                codes[0][k] = low_halves(a, b);
                codes[1][k] = high_halves(a, b);
                const uint32_t* const of = scales + 8 * k * tile.groups + group;
                scale[k] = low_halves(of[0], of[tile.groups]);
                minimum[k] = high_halves(of[0], of[tile.groups]);
            }
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const auto pair = [&](int k) {
                return unit_pair<Row>(codes[i / 4][k], i % 4, scale[k], minimum[k]);
            };
            multiply_add_f16(sums[n + i], weights, pair(0), pair(1));
        }
    }
}

}  // namespace slimrt::cuda
