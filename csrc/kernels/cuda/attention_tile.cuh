// Rows of any type, stored or fresh, as tiles of 16-bit numbers in shared memory, for products of many
// queries: scaled, biased and rotated in float32, once for all queries of a block.
#pragma once

#include "kernels/cuda/attention_parts.cuh"
#include "kernels/cuda/ptx.cuh"

namespace slimrt::cuda {

/// `rows` rows of f16, `stride` bytes apart (an odd multiple of 16). A row is in units of a power of two,
/// which is in the 16 bytes after it, so that no number overflows or is lost. After `exact` rows come their
/// rests, f16 of what the first ones round off: together they have 22 bits.
struct F16Tile {
    unsigned char* data;
    int stride, rows;

    __device__ unsigned char* at(int row, int column) const { return data + row * stride + column * 2; }
    __device__ float& unit(int row) const {
        return *reinterpret_cast<float*>(data + (row + 1) * stride - 16);
    }
    __device__ int rest() const { return rows * stride; }  // bytes from a number to its rest
};

/// Columns of a head, padded; bytes from row to row of a tile.
__host__ __device__ inline int padded(int dim) { return (dim + 15) / 16 * 16; }
__host__ __device__ inline int tile_stride(int dim) { return padded(dim) * 2 + 16; }

/// What pair_f16(x, y) = `high` rounds off.
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
        if (head_dim % 16) {  // eight codes are scattered in the bytes, and rows are at multiples of 4
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
template <class Row>
__device__ inline void read8(const RowsView& rows, const HeadRow& row, int column, float (&x)[8]) {
    typename Row::Code codes[8];
    load8<Row>(row.data, column, rows.head_dim, codes);
    typename Row::Scale scale = scale_of<Row>(rows, row, column);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (i && rows.scale_tokens) scale = scale_of<Row>(rows, row, column + i);
        x[i] = Row::number(codes[i], scale);
    }
}

/// One head of rows, and what is applied to it.
struct HeadSource {
    RowsView rows;
    const int32_t* table;
    int head, first, dim;                               // stored head, and where in it the columns begin
    const float *row_scale = nullptr, *bias = nullptr;  // of these columns
    RowsView factors;
    int factor_head = 0;
    FloatRows rope_table;
    int n_rot = 0;
    bool interleaved = false;
    bool packed = false;  // in the format of a tile (attention_packed.cuh)
    size_t rest = 0;      // bytes from these to the rests of exact ones

    /// Whether rows are copied to a tile as they are.
    __device__ bool copies(bool exact) const {
        return packed || (!exact && rows.dtype == DType::F16 && !row_scale && !bias && !n_rot);
    }
};

/// The source of a term's head; where stored heads are not the term's, there is a single one.
template <class Term>
__device__ inline HeadSource source_of(const Term& term, const RowsView& rows, const int32_t* table,
                                       int head) {
    HeadSource from{};
    from.rows = rows;
    from.table = table;
    from.dim = term.dim;
    const bool side_by_side = rows.head_dim != term.dim || !rows.paged;
    from.head = side_by_side ? 0 : head;
    from.first = side_by_side ? head * term.dim : 0;
    return from;
}
__device__ inline HeadSource keys_of(const ScoreView& term, const RowsView& rows, const RowsView& factors,
                                     const int32_t* table, int head) {
    HeadSource from = source_of(term, rows, table, head);
    from.row_scale = term.row_scale ? term.row_scale + head * term.dim : nullptr;
    from.bias = term.bias ? term.bias + head * term.dim : nullptr;
    if (term.fresh_factors.data) from.factors = factors;
    from.factor_head = term.head_factors ? head : 0;
    from.rope_table = term.rope_table;
    from.n_rot = term.n_rot;
    from.interleaved = term.interleaved;
    return from;
}

/// Eight columns of a row, scaled and biased.
template <class Row>
__device__ inline void read_scaled(const HeadSource& from, const HeadRow& row, float factor, int column,
                                   float (&x)[8]) {
    read8<Row>(from.rows, row, from.first + column, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (from.row_scale) x[i] *= from.row_scale[column + i] * factor;
        if (from.bias) x[i] += from.bias[column + i];
    }
}

/// And rotated; n_rot / 2 (interleaved: n_rot) is a multiple of 8.
template <class Row>
__device__ inline void read_rotated(const HeadSource& from, int64_t position, int column, float (&x)[8]) {
    const HeadRow row = row_at(from.rows, from.table, position, from.head);
    float factor = 1;
    if (from.row_scale && from.factors.base)
        factor = *reinterpret_cast<const float*>(
            row_at(from.factors, from.table, position, from.factor_head).data);
    read_scaled<Row>(from, row, factor, column, x);
    if (column >= from.n_rot) return;
    const float* const rope_row = from.rope_table.row(position);
    if (from.interleaved) {
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            const float cos = rope_row[column + i], sin = rope_row[column + i + 1], a = x[i], b = x[i + 1];
            x[i] = a * cos - b * sin;
            x[i + 1] = a * sin + b * cos;
        }
        return;
    }
    const int half = from.n_rot / 2;
    const bool upper = column >= half;
    const int pair = upper ? column - half : column;
    float other[8];
    read_scaled<Row>(from, row, factor, upper ? column - half : column + half, other);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float cos = rope_row[2 * (pair + i)], sin = rope_row[2 * (pair + i) + 1];
        x[i] = x[i] * cos + (upper ? other[i] : -other[i]) * sin;
    }
}

/// Writes eight numbers of a row to a tile; all lanes of the row (`lanes` of them) call it.
template <bool exact>
__device__ inline void write8(const F16Tile& to, int row, int column, bool wanted, int lanes,
                              const float (&x)[8]) {
    float most = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf(x[i]));
    for (int step = lanes / 2; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    const float unit = unit_below(most), shrink = inverse_of_unit(unit);
    if (!wanted) return;
    if (column == 0) to.unit(row) = most == 0 ? 0 : unit;  // 0 does not count among a tile's units
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

constexpr int kTileThreads = 128;  // of a block that fills tiles

/// How a block's threads divide a tile's rows: a power of two of them has a row, eight columns each.
struct TileThread {
    int lanes, column, row, step;  // first row of this thread, and how many rows on its next one is

    __device__ explicit TileThread(int dim) {
        const int shift = 32 - __clz(padded(dim) / 8 - 1);
        lanes = 1 << shift;
        column = int(threadIdx.x & (lanes - 1)) * 8;
        row = int(threadIdx.x >> shift);
        step = kTileThreads >> shift;
    }
};

/// Fills a tile: fn(row, column, x) sets eight columns, which are zeros at first. A thread reads kAtOnce rows
/// before it writes one, since loads do not pass stores.
template <bool exact, int kAtOnce, class Fn>
__device__ inline void fill_tile(const F16Tile& to, int dim, const Fn& fn) {
    const TileThread own(dim);
#pragma unroll 1
    for (int first = own.row; first < to.rows; first += kAtOnce * own.step) {
        float x[kAtOnce][8] = {};
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int row = first + i * own.step;
            if (own.column < dim && row < to.rows) fn(row, own.column, x[i]);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int row = first + i * own.step;
            write8<exact>(to, row, own.column, own.column < padded(dim) && row < to.rows, own.lanes, x[i]);
        }
    }
}

/// Copies paged rows of f16 to a tile as they are. `from` is in shared memory, which the compiler must expect
/// each copy to change, so that its fields are read before.
__device__ inline void copy_paged(const HeadSource& from, int64_t first, int n, const F16Tile& to) {
    const TileThread own(from.dim);
    if (own.column >= padded(from.dim)) return;
    const RowsView& rows = from.rows;
    const unsigned char* const base =
        rows.base + from.head * rows.head_block + size_t(from.first + own.column) * 2;
    const size_t block_stride = rows.block_stride, row_bytes = rows.head_elements;
    const int32_t* const table = from.table;
    const int end = own.column < from.dim ? n : 0, step = own.step;
    unsigned char* at = to.at(own.row, own.column);
    for (int row = own.row; row < to.rows; row += step, at += step * to.stride) {
        const bool wanted = row < end;
        const uint64_t position = first + (wanted ? row : 0);
        copy16(at, base + table[position / kBlockTokens] * block_stride + position % kBlockTokens * row_bytes,
               wanted);
    }
}

/// The same for dense rows, and for packed ones, whose rests may follow.
template <bool exact>
__device__ inline void copy_dense(const HeadSource& from, int64_t first, int n, const F16Tile& to) {
    const TileThread own(from.dim);
    if (own.column >= padded(from.dim)) return;
    const size_t row_bytes = from.rows.row_bytes, rest = from.rest;
    const unsigned char* const base = from.rows.base + (first - from.rows.first) * row_bytes +
                                      from.head * size_t(from.rows.dense_head) +
                                      size_t(from.first + own.column) * 2;
    const int end = own.column < from.dim ? n : 0, step = own.step;
    const bool unit = from.packed && own.column == 0;
    const int data_step = step * static_cast<int>(row_bytes), at_step = step * to.stride;
    const unsigned char* data = base + own.row * row_bytes;
    unsigned char* at = to.at(own.row, own.column);
    int row = own.row;
#pragma unroll 4
    for (; row < end; row += step, at += at_step, data += data_step) {
        copy16(at, data);
        if constexpr (exact) copy16(at + to.rest(), data + rest);
        if (unit) copy16(at + to.stride - 16, data + row_bytes - 16);
    }
    for (; row < to.rows; row += step, at += at_step) {
        copy16(at, base, false);
        if constexpr (exact) copy16(at + to.rest(), base, false);
    }
}

/// Copies rows of f16, or packed ones with their units, to a tile, which has no more rows than a block
/// threads.
template <bool exact>
__device__ inline void copy_tile(const HeadSource& from, int64_t first, int n, const F16Tile& to) {
    // Units of rows that are not packed; 0 for missing rows, which do not count.
    if (const int row = threadIdx.x; row < to.rows && (row >= n || !from.packed)) to.unit(row) = row < n;
    if (!exact && from.rows.paged)
        copy_paged(from, first, n, to);
    else
        copy_dense<exact>(from, first, n, to);
}

/// Loads rows [first, first + n) to a tile; its other rows become zeros. The caller commits the copies.
template <bool exact>
__device__ inline void load_tile(const HeadSource& from, int64_t first, int n, const F16Tile& to) {
    if (from.copies(exact)) return copy_tile<exact>(from, first, n, to);
    with_row_type(from.rows.dtype, [&]<class Row>(Row) {
        fill_tile<exact, 1>(to, from.dim, [&](int row, int column, float(&x)[8]) {
            if (row < n) read_rotated<Row>(from, first + row, column, x);
        });
    });
}

}  // namespace slimrt::cuda
