// Tiles of 32 rows of one head as they are stored: their asynchronous copies to shared memory, and products
// with them.
#pragma once

#include "kernels/cuda/attention_rotated.cuh"

namespace slimrt::cuda {

/// A plane, and how its tiles are copied.
struct TilePlane {
    RowsView rows;
    size_t head_bytes, head_scales;  // bytes from a head's elements, and scales, to the next head's
    size_t pitch;                    // bytes from row to row
    int lines;                       // that are copied: rows, or one line of all rows
    int chunks, chunk_divisor;       // of 16 bytes in a line; i / chunks = i * divisor >> 16
    int line_step, chunk_step;       // 32 chunks further are so many lines and chunks further
    uint32_t source_step, target_step, source_wrap,
        target_wrap;   // bytes; wrap: added where a line ends in between
    int scale_chunks;  // of a tile
    int stride;        // bytes from row to row in shared memory
    int groups;
    int bytes;  // of a tile in shared memory
    Reading reading;

    __device__ CodeTile at(const unsigned char* shared) const { return {shared, stride, groups}; }
    __device__ bool row_scales() const { return reading == Reading::bytes && scale_chunks > 0; }
};

/// Visible rows [first, end) of a tile.
struct VisibleRows {
    int first, end;
    __device__ bool all() const { return first == 0 && end == kBlockRows; }
    __device__ bool has(int row) const { return row >= first && row < end; }
};

/// Starts the copies of lines from `source` on. wraps: lines may end between two copies of a lane.
template <bool wraps>
__device__ inline void fetch_lines(const TilePlane& p, const unsigned char* source, VisibleRows visible,
                                   unsigned char* target) {
    const int lane = threadIdx.x % 32;
    int line = lane * p.chunk_divisor >> 16, chunk = lane - line * p.chunks;
    source += line * p.pitch + chunk * 16;
    target += line * p.stride + chunk * 16;
#pragma unroll 1
    for (; line < p.lines; line += p.line_step, source += p.source_step, target += p.target_step) {
        // Masked rows are filled with zeros, as they must be finite; any few bits are finite.
        copy16(target, source, few_bits(p.reading) || visible.has(line));
        if (!wraps || (chunk += p.chunk_step) < p.chunks) continue;
        line += 1, chunk -= p.chunks;
        source += p.source_wrap, target += p.target_wrap;
    }
}

/// Starts the copies of one head of a tile; block: of the cache, if paged.
__device__ inline void fetch(const TilePlane& p, int32_t block, int64_t tile, int head, VisibleRows visible,
                             unsigned char* to) {
    const int lane = threadIdx.x % 32;
    const unsigned char* const from = !p.rows.paged ? p.rows.base + (tile * kBlockRows - p.rows.first) *
                                                                        static_cast<int64_t>(p.rows.row_bytes)
                                                    : p.rows.base + block * p.rows.block_stride;
    const unsigned char* const rows = from + head * p.head_bytes;
    p.chunk_step ? fetch_lines<true>(p, rows, visible, to) : fetch_lines<false>(p, rows, visible, to);
    const unsigned char* const scales = from + kBlockRows * p.pitch + head * p.head_scales;
#pragma unroll 1
    for (int i = lane; i < p.scale_chunks; i += 32)
        copy16(to + kBlockRows * p.stride + i * 16, scales + i * 16);
}

/// Zeros the scales of masked rows, which may be anything.
__device__ inline void clear_scales(const TilePlane& p, VisibleRows visible, unsigned char* tile) {
    const int lane = threadIdx.x % 32;
    uint32_t* const scales = reinterpret_cast<uint32_t*>(tile + kBlockRows * p.stride) + lane * p.groups;
    for (int i = 0; i < p.groups && !visible.has(lane); ++i) scales[i] = 0;
    __syncwarp();
}

__device__ inline void score(const TilePlane& p, const CodeTile& tile, const uint4* queries, int steps,
                             float (&s)[4][4]) {
    with_row_type(p.rows.dtype, [&]<class Row>(Row) {
        constexpr Reading reading = reading_of(Row::kType);
        if constexpr (reading == Reading::bytes)
            score_bytes<Row>(tile, queries, steps, s);
        else if constexpr (few_bits(reading))
            p.rows.scale_tokens ? score_units<Row, true>(tile, queries, steps, s)
                                : score_units<Row, false>(tile, queries, steps, s);
        else if constexpr (reading != Reading::f32)
            score_halves<reading == Reading::bf16>(tile, queries, steps, s);
    });
}

/// With RoPE on read, for rows of few bits.
__device__ inline void score(const TilePlane& p, const CodeTile& tile, const TileRotations& rotations,
                             float (&s)[4][4]) {
    with_row_type(p.rows.dtype, [&]<class Row>(Row) {
        if constexpr (Row::kGroup)
            p.rows.scale_tokens ? score_rotated<Row, true>(tile, rotations, s)
                                : score_rotated<Row, false>(tile, rotations, s);
    });
}

template <int kTiles>
__device__ inline void add(const TilePlane& p, const CodeTile& tile, int first, int dim,
                           const uint32_t (&w)[4], float (&sums)[kTiles][4]) {
    with_row_type(p.rows.dtype, [&]<class Row>(Row) {
        constexpr Reading reading = reading_of(Row::kType);
        if constexpr (reading == Reading::bytes)
            add_bytes<Row>(tile, first, dim, w, sums);
        else if constexpr (few_bits(reading))
            add_units<Row>(tile, first, dim, w, sums);
        else if constexpr (reading != Reading::f32)
            add_halves<reading == Reading::bf16>(tile, first, dim, w, sums);
    });
}

inline TilePlane plane_of(const Rows& rows, int dim) {
    const int tokens = kBlockRows;
    const HeadBytes row = head_bytes(rows.dtype, dim);
    const HeadBytes head = head_bytes(rows.dtype, dim, tokens, rows.scale_tokens);
    const bool own_heads = rows.heads > 1;  // else a row's heads are contiguous
    const bool by_rows = row.elements % 16 == 0;
    TilePlane p{};
    p.rows = RowsView(rows);
    p.reading = reading_of(rows.dtype);
    p.pitch = rows.block_tokens ? p.rows.head_elements : rows.row_bytes;
    p.head_bytes = own_heads ? head.total() : row.elements;
    p.head_scales = own_heads ? p.head_bytes : 0;
    p.lines = by_rows ? tokens : 1;
    p.chunks = static_cast<int>(row.elements * (tokens / p.lines) / 16);
    p.chunk_divisor = 65536 / p.chunks + 1;
    p.line_step = 32 / p.chunks;
    p.chunk_step = 32 % p.chunks;
    p.scale_chunks = static_cast<int>(head.scales / 16);
    p.stride = static_cast<int>(row.elements) | (by_rows ? 16 : 0);
    const auto bytes = [](auto n) { return static_cast<uint32_t>(n); };
    p.source_step = bytes(p.line_step * p.pitch + p.chunk_step * 16);
    p.target_step = bytes(p.line_step * p.stride + p.chunk_step * 16);
    p.source_wrap = bytes(p.pitch - p.chunks * 16);
    p.target_wrap = bytes(p.stride - p.chunks * 16);
    p.groups = few_bits(p.reading) ? dim / 32 : 0;
    p.bytes = tokens * p.stride + p.scale_chunks * 16;
    return p;
}

/// Whether a plane's tiles can be copied: rows of a head, in few bits 32 of them, must be whole pieces of 16
/// bytes. Only few bits may have scales of channels.
inline bool can_fetch(const Rows& rows, int n_heads, int dim) {
    const bool few = has_groups(rows.dtype);
    if (rows.dtype == DType::F32 || dim % (few ? 32 : 16) || dim > 256) return false;
    if (rows.scale_tokens && !(few && rows.scale_tokens == kBlockRows)) return false;
    if (reinterpret_cast<uintptr_t>(rows.base) % 16) return false;
    if (rows.block_tokens == 0) return is_float(rows.dtype) && rows.row_bytes % 16 == 0;
    const bool own = rows.heads == n_heads && rows.head_dim() == dim;
    const bool side_by_side =
        rows.heads == 1 && !few && head_bytes(rows.dtype, rows.width).elements % 16 == 0;
    return rows.block_tokens == kBlockRows && rows.block_stride % 16 == 0 && (own || side_by_side);
}

}  // namespace slimrt::cuda
