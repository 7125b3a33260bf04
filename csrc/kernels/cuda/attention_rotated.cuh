// Scores with RoPE on read, for rows of few bits. R(first + i) = R(first) R(i): queries are rotated back by
// the position of a tile's first row, in float32; rows by their place i in the tile, as they are unpacked.
#pragma once

#include "kernels/cuda/attention_codes.cuh"

namespace slimrt::cuda {

/// For heads that rotate as a whole, with NeoX pairs and in whole groups.
struct TileRotations {
    const float* queries;  // [query][2 * half], in units
    const float* first;    // the RoPE table's row at the tile's first row: cos and sin of its pairs
    const uint2* within;   // [row of a tile][unit][pair]: cos and sin of two columns, as f16
    int half;

    static int bytes(int dim) { return kBlockRows * dim / 2 * 4; }
};

/// Fills TileRotations::within, by all threads: R(i) from rows 0 and i of the table, which may have a
/// magnitude and begin at any angle.
__device__ inline void place_rotations(const FloatRows& table, Reading reading, int half, uint2* to) {
    const int pairs = half / 2;
    for (int at = threadIdx.x; at < kBlockRows * pairs; at += blockDim.x) {
        const float *const one = table.row(0), *const rope_row = table.row(at / pairs);
        float cos[2], sin[2];
        for (int i = 0; i < 2; ++i) {
            const int column = unit_column(reading, at % pairs / 4, at % 4, i);
            const float c = rope_row[2 * column], s = rope_row[2 * column + 1];
            const float c0 = one[2 * column], s0 = one[2 * column + 1], size = c0 * c0 + s0 * s0;
            cos[i] = (c * c0 + s * s0) / size;
            sin[i] = (s * c0 - c * s0) / size;
        }
        to[at] = make_uint2(pair_f16(cos[0], cos[1]), pair_f16(sin[0], sin[1]));
    }
}

/// This lane's query, rotated back: at the columns of a unit, two steps of them, and half a head further.
__device__ inline void rotate_query(const TileRotations& rotations, Reading reading, int unit,
                                    uint32_t (&q)[4][4]) {
    const float* const from = rotations.queries + threadIdx.x % 32 / 4 * 2 * rotations.half;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        float low[2], high[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int column = unit_column(reading, unit, k, i);
            const float x = from[column], y = from[column + rotations.half];
            const float cos = rotations.first[2 * column], sin = rotations.first[2 * column + 1];
            low[i] = x * cos + y * sin;
            high[i] = y * cos - x * sin;
        }
        const int at = k % 2 * 2;
        split_pair(false, low[0], low[1], q[k / 2][at], q[k / 2][at + 1]);
        split_pair(false, high[0], high[1], q[2 + k / 2][at], q[2 + k / 2][at + 1]);
    }
}

template <class Row, bool channels>
__device__ inline void score_rotated(const CodeTile& tile, const TileRotations& rotations, float (&s)[4][4]) {
    constexpr Reading reading = reading_of(Row::kType);
    const int own = threadIdx.x % 32 / 4, units = rotations.half / Row::kUnit;
    const uint32_t* const scales = reinterpret_cast<const uint32_t*>(tile.scales());
#pragma unroll 1
    for (int unit = threadIdx.x % 4; unit < units; unit += 4) {
        uint32_t q[4][4];
        rotate_query(rotations, reading, unit, q);
        UnitScales of, of_other;
        if constexpr (channels) {
            of.set(scales, reading, unit);
            of_other.set(scales, reading, unit + units);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = 8 * i + own;
            const unsigned char* const row = tile.rows + at * tile.stride;
            const uint32_t codes = load_unit<Row>(row, unit), others = load_unit<Row>(row, unit + units);
            if constexpr (!channels) {
                of.set(scales[at * tile.groups + unit / 4]);
                of_other.set(scales[at * tile.groups + (unit + units) / 4]);
            }
            uint32_t low[4], high[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const uint2 rotation = rotations.within[(at * units + unit) * 4 + k];
                const uint32_t x = unit_pair<Row>(codes, k, of.scale[k], of.minimum[k]);
                const uint32_t y = unit_pair<Row>(others, k, of_other.scale[k], of_other.minimum[k]);
                low[k] =
                    multiply_add_f16x2(x, rotation.x, multiply_add_f16x2(y, rotation.y ^ 0x80008000u, 0));
                high[k] = multiply_add_f16x2(x, rotation.y, multiply_add_f16x2(y, rotation.x, 0));
            }
            multiply_add_f16(s[i], q[0], low[0], low[1]);
            multiply_add_f16(s[i], q[1], low[2], low[3]);
            multiply_add_f16(s[i], q[2], high[0], high[1]);
            multiply_add_f16(s[i], q[3], high[2], high[3]);
        }
    }
}

}  // namespace slimrt::cuda
