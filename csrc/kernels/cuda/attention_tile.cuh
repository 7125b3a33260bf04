// Rows of any type, stored or fresh, into tiles of 16-bit numbers in shared memory, as the products of many
// queries read them: scaled, biased and rotated in float32, once for all queries of a block.
#pragma once

#include "kernels/cuda/attention_parts.cuh"
#include "kernels/cuda/ptx.cuh"

namespace slimrt::cuda {

/// `rows` rows of f16 `stride` bytes apart (an odd number of 16 bytes). A row's numbers are in units of a
/// power of two, so that none is too large or lost. Of `exact` ones the rests follow, as many f16 that the
/// first ones leave out: together they have 22 bits.
struct Tile {
    unsigned char* data;
    int stride, rows;
    float* units;

    __device__ unsigned char* at(int row, int column) const { return data + row * stride + column * 2; }
    __device__ int rest() const { return rows * stride; }  // bytes
};

/// Padded columns of a head, and bytes from a row of a tile to the next.
__host__ __device__ inline int padded(int dim) { return (dim + 15) / 16 * 16; }
__host__ __device__ inline int tile_stride(int dim) { return padded(dim) * 2 + 16; }

/// What pair_f16(x, y) = `high` leaves out.
__device__ inline uint32_t rest_of_pair(float x, float y, uint32_t high) {
    return pair_f16(x - from_f16(high & 0xffff), y - from_f16(high >> 16));
}

/// The codes of columns [column, column + 8) of a head of a row, at a multiple of 8; the row is aligned to 16
/// bytes, or as well as a row of so many columns can be.
template <class Row>
__device__ inline void load8(const unsigned char* row, int column, int head_dim,
                             typename Row::Code (&codes)[8]) {
    using Code = typename Row::Code;
    if constexpr (!Row::kGroup) {
        constexpr int kAtOnce = 16 / sizeof(Code) < 8 ? 16 / sizeof(Code) : 8;
#pragma unroll
        for (int first = 0; first < 8; first += kAtOnce) {
            const auto some = load_pack<kAtOnce>(reinterpret_cast<const Code*>(row) + column + first);
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) codes[first + i] = some.at[i];
        }
    } else if constexpr (Row::kBits < 4) {
        uint32_t unit = 0;
#pragma unroll
        for (int i = 0; i < Row::kBits; ++i) unit |= row[column / 8 * Row::kBits + i] << 8 * i;
#pragma unroll
        for (int i = 0; i < 8; ++i) codes[i] = unit >> Row::kBits * i & Row::kMaxCode;
    } else {
        const int first = column / Row::kGroup * Row::kGroup, half = Row::half_group(first, head_dim);
        if (head_dim % 16) {  // eight here and there in two bytes, rows at multiples of 4
#pragma unroll
            for (int i = 0; i < 8; ++i) codes[i] = Row::code(row, column + i, head_dim);
            return;
        }
        const bool upper = column - first >= half;
        const auto bytes = load_pack<8>(row + column - first / 2 - (upper ? half : 0));
#pragma unroll
        for (int i = 0; i < 8; ++i) codes[i] = bytes.at[i] >> (upper ? 4 : 0) & 15;
    }
}

/// Columns [column, column + 8) of a head of a row, at a multiple of 8; the row is aligned to 16 bytes.
__device__ inline void read8(const RowsView& rows, const HeadRow& row, int column, float (&x)[8]) {
    with_row_type(rows.dtype, [&]<class Row>(Row) {
        typename Row::Code codes[8];
        load8<Row>(row.data, column, rows.head_dim, codes);
        typename Row::Scale scale = scale_of<Row>(rows, row, column);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (i && rows.scale_tokens) scale = scale_of<Row>(rows, row, column + i);
            x[i] = Row::number(codes[i], scale);
        }
    });
}

/// One head of rows, and what is done to it.
struct HeadSource {
    RowsView rows;
    const int32_t* table;
    int head, first, dim;                               // stored head, and where in it the columns begin
    const float *row_scale = nullptr, *bias = nullptr;  // of these columns
    RowsView factors;
    int factor_head = 0;
    FloatRows turns;
    int n_rot = 0;
    bool interleaved = false;

    __device__ bool plain() const { return !row_scale && !bias && !n_rot; }
};

/// Eight columns of a row, with all that is done to it but the rotation.
__device__ inline void read_scaled(const HeadSource& from, const HeadRow& row, float factor, int column,
                                   float (&x)[8]) {
    read8(from.rows, row, from.first + column, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (from.row_scale) x[i] *= from.row_scale[column + i] * factor;
        if (from.bias) x[i] += from.bias[column + i];
    }
}

/// Rotated on top, where n_rot / 2 (of neighbours n_rot) is a multiple of 8.
__device__ inline void read_rotated(const HeadSource& from, const HeadRow& row, int64_t position, int column,
                                    float (&x)[8]) {
    float factor = 1;
    if (from.row_scale && from.factors.base)
        factor = *reinterpret_cast<const float*>(
            row_at(from.factors, from.table, position, from.factor_head).data);
    read_scaled(from, row, factor, column, x);
    if (column >= from.n_rot) return;
    const float* const turn = from.turns.row(position);
    if (from.interleaved) {
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            const float cos = turn[column + i], sin = turn[column + i + 1], a = x[i], b = x[i + 1];
            x[i] = a * cos - b * sin;
            x[i + 1] = a * sin + b * cos;
        }
        return;
    }
    const int half = from.n_rot / 2;
    const bool upper = column >= half;
    const int pair = upper ? column - half : column;
    float other[8];
    read_scaled(from, row, factor, upper ? column - half : column + half, other);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float cos = turn[2 * (pair + i)], sin = turn[2 * (pair + i) + 1];
        x[i] = x[i] * cos + (upper ? other[i] : -other[i]) * sin;
    }
}

/// Eight numbers of a row to where they belong in a tile; all lanes of the row's group (of `lanes`) call it.
template <bool exact>
__device__ inline void write8(const Tile& to, int row, int column, bool wanted, int lanes,
                              const float (&x)[8]) {
    float most = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf(x[i]));
    for (int step = lanes / 2; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    const float unit = unit_below(most), shrink = inverse_of_unit(unit);
    if (column == 0) to.units[row] = unit;
    if (!wanted) return;
    uint32_t words[4], rest[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float low = x[2 * i] * shrink, high = x[2 * i + 1] * shrink;
        words[i] = pair_f16(low, high);
        if constexpr (exact) rest[i] = rest_of_pair(low, high, words[i]);
    }
    uint4* const at = reinterpret_cast<uint4*>(to.at(row, column));
    *at = make_uint4(words[0], words[1], words[2], words[3]);
    if constexpr (exact)
        *reinterpret_cast<uint4*>(to.at(row, column) + to.rest()) =
            make_uint4(rest[0], rest[1], rest[2], rest[3]);
}

/// How a block's threads share a tile's rows: a power of two of them has a row, eight columns each.
struct TileThread {
    int lanes, column, row, step;  // its first row, and how many there are to its next

    __device__ explicit TileThread(int dim) {
        int shift = 1;
        while (8 << shift < padded(dim)) ++shift;
        lanes = 1 << shift;
        column = int(threadIdx.x & (lanes - 1)) * 8;
        row = int(threadIdx.x >> shift);
        step = int(blockDim.x >> shift);
    }
};

/// Calls fn(row, column, x) for a tile's eight columns at a time, to fill x, zeros at first, and writes them.
template <bool exact, class Fn>
__device__ inline void fill_tile(const Tile& to, int dim, const Fn& fn) {
    const TileThread own(dim);
#pragma unroll 1
    for (int row = own.row; row < to.rows; row += own.step) {
        float x[8] = {};
        if (own.column < dim) fn(row, own.column, x);
        write8<exact>(to, row, own.column, own.column < padded(dim), own.lanes, x);
    }
}

/// Rows of f16 to a tile as they are. What a source says is read from shared memory, which every copy might
/// change for all that the compiler knows, so what the rows have in common is read before them.
__device__ inline void copy_tile(const HeadSource& from, int64_t first, int n, const Tile& to) {
    const TileThread own(from.dim);
    if (own.column >= padded(from.dim)) return;
    const RowsView& rows = from.rows;
    const bool paged = rows.paged;
    const size_t offset =
        from.head * (paged ? rows.head_block : size_t(rows.dense_head)) + size_t(from.first + own.column) * 2;
    const unsigned char* const base = rows.base + offset;
    const size_t block_stride = rows.block_stride, row_bytes = paged ? rows.head_elements : rows.row_bytes;
    const int32_t* const table = from.table;
    const int64_t begin = paged ? first : first - rows.first;
    const int end = own.column < from.dim ? n : 0, step = own.step;
    unsigned char* at = to.at(own.row, own.column);
    for (int row = own.row; row < to.rows; row += step, at += step * to.stride) {
        if (own.column == 0) to.units[row] = 1;
        const bool wanted = row < end;
        const uint64_t position = begin + (wanted ? row : 0);
        const unsigned char* const data =
            paged ? base + table[position / kBlockTokens] * block_stride + position % kBlockTokens * row_bytes
                  : base + position * row_bytes;
        copy16(at, data, wanted);
    }
}

/// Rows [first, first + n) to a tile; the others are zeros. Copies that are still under way are committed.
template <bool exact>
__device__ inline void load_tile(const HeadSource& from, int64_t first, int n, const Tile& to) {
    if (!exact && from.rows.dtype == DType::F16 && from.plain()) return copy_tile(from, first, n, to);
    fill_tile<exact>(to, from.dim, [&](int row, int column, float(&x)[8]) {
        if (row >= n) return;
        read_rotated(from, row_at(from.rows, from.table, first + row, from.head), first + row, column, x);
    });
}

}  // namespace slimrt::cuda
