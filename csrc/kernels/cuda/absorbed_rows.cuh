// Rows on their way into a block: bulk copies of its slice of each tile, and their conversion to f16.
#pragma once

#include "kernels/cuda/absorbed_plan.h"
#include "kernels/cuda/ptx_sm90.cuh"

namespace slimrt::cuda {

/// What a block computes: the tiles [first, first + n) of a sequence, its slice of their columns.
struct AbsorbedShare {
    int rank, sequence, split;
    int64_t query, position, begin, end;  // rows [begin, end) are seen
    const int32_t* table;
    int64_t first;
    int n_tiles;

    __device__ AbsorbedShare(const Absorbed& x)
        : rank(static_cast<int>(cluster_rank())),
          sequence(static_cast<int>(blockIdx.y)),
          split(static_cast<int>(blockIdx.x) / x.cluster) {
        const PlacedSequence& s = x.placed[sequence];
        query = s.query + x.query_shift;
        position = s.position;
        table = s.table;
        begin = x.window > 0 ? max(s.begin, position - x.window + 1) : s.begin;
        end = s.causal ? min(s.end, position + 1) : s.end;
        const int64_t from = begin / kTileTokens, all = (end + kTileTokens - 1) / kTileTokens - from;
        const int64_t tiles = end > begin ? all : 0;
        first = from + tiles * split / x.splits;
        n_tiles = static_cast<int>(from + tiles * (split + 1) / x.splits - first);
    }
    __device__ int64_t first_row(int tile) const { return (first + tile) * kTileTokens; }
    __device__ bool sees(int tile, int row) const {
        return first_row(tile) + row >= begin && first_row(tile) + row < end;
    }
    /// The nearest row of a tile that is seen: what is read in place of rows that may hold anything.
    __device__ int seen_row(int tile, int row) const {
        const int64_t at = first_row(tile) + row;
        return static_cast<int>(max(begin, min(at, end - 1)) - first_row(tile));
    }
    __device__ const unsigned char* block_of(const RowsView& rows, int tile) const {
        return rows.base + table[first + tile] * rows.block_stride;
    }
};

/// A place in a ring of n, and the parity that its barrier's phase has.
struct Ring {
    int n, at = 0;
    uint32_t parity = 0;
    __device__ explicit Ring(int n) : n(n) {}
    __device__ void next() {
        if (++at < n) return;
        at = 0;
        parity ^= 1;
    }
};

__device__ inline int columns_of(const AbsorbedPlane& plane, int rank) {
    return max(0, min(plane.slice, plane.width - rank * plane.slice));
}

/// Calls copy(to, from, bytes) for what the one who brings row `row` brings of the rows of a tile.
template <class Copy>
__device__ void copy_rows(const Absorbed& x, const AbsorbedShare& share, int tile, int row, Copy&& copy) {
    const AbsorbedPlane& plane = x.rows;
    const RowsView& rows = plane.rows;
    const unsigned char* const from = share.block_of(rows, tile) + share.rank * plane.slice_bytes;
    if (plane.by_heads && x.converted) {
        if (row == 0) copy(plane.raw, from, plane.slice_bytes);
        return;
    }
    const unsigned char* data = from + share.seen_row(tile, row) * rows.head_elements;
    const int to = x.converted ? plane.raw : plane.tile, stride = x.converted ? plane.raw_row : plane.stride;
    const int bytes = bytes_of(rows.dtype, plane.piece);
    for (int i = 0; i < plane.pieces; ++i, data += (rows.head_elements + rows.head_scales) * kTileTokens)
        copy(to + row * stride + i * bytes, data, bytes);
    if (x.converted && rows.head_scales && row == 0)
        copy(plane.raw + kTileTokens * plane.raw_row,
             share.block_of(rows, tile) + kTileTokens * rows.head_elements, kTileTokens * rows.head_scales);
}

/// Where a residual's row of a tile begins, in its block.
__device__ inline int residual_begin(const AbsorbedPlane& plane, const AbsorbedShare& share, int tile,
                                     int row) {
    return share.seen_row(tile, row) * plane.rows.head_elements +
           bytes_of(plane.rows.dtype, share.rank * plane.slice);
}

/// The same for the residual, whose rows begin at any byte: copies of 16 bytes reach beyond them.
template <class Copy>
__device__ void copy_residual(const Absorbed& x, const AbsorbedShare& share, int tile, int row, Copy&& copy) {
    const AbsorbedPlane& plane = x.residual;
    const int columns = columns_of(plane, share.rank);
    if (columns == 0) return;
    const unsigned char* const from = share.block_of(plane.rows, tile);
    const int begin = residual_begin(plane, share, tile, row);
    const int end = begin + bytes_of(plane.rows.dtype, columns + 1), aligned = begin / 16 * 16;
    const int whole = kTileTokens * plane.rows.head_elements;
    copy(plane.raw + row * plane.raw_row, from + aligned, (min(end, whole) + 15) / 16 * 16 - aligned);
    if (plane.rows.head_scales && row == 0)
        copy(plane.raw + kTileTokens * plane.raw_row, from + whole, kTileTokens * plane.rows.head_scales);
}

/// And for what scores take besides: of the rope table the row of every eighth token, and the rows' factors.
template <class Copy>
__device__ void copy_besides(const Absorbed& x, const AbsorbedShare& share, int tile, int row, Copy&& copy) {
    const HeadScores& head = x.head;
    if (head.table && row % 8 == 0) {
        const int64_t turn = min(share.first_row(tile) + row, head.table_rows - 1);
        copy(x.at.turns + row / 8 * head.n_rot * 4, head.table + turn * head.n_rot, head.n_rot * 4);
    }
    if (head.has_factors && row == 0) copy(x.at.factors, share.block_of(head.factors, tile), kTileTokens * 4);
}

/// The warps that empty the stages, who fill them again. Each brings a few rows of every tile: a bulk copy is
/// started by one lane after the other, so none of the warps should start all of them.
struct Loader {
    const Absorbed& x;
    const AbsorbedShare& share;
    uint64_t *full, *empty;
    int warp, warps, lane;

    __device__ void load(int tile, int stage) const {
        const int rows = kTileTokens / warps, row = warp * rows + lane;
        unsigned char* const to = shared_memory() + stage * x.at.stage_bytes;
        const auto each = [&](auto&& copy) {
            if (lane >= rows) return;
            copy_rows(x, share, tile, row, copy);
            if (x.residual.width) copy_residual(x, share, tile, row, copy);
            copy_besides(x, share, tile, row, copy);
        };
        unsigned bytes = 0;
        each([&](int, const void*, int n) { bytes += n; });
        for (int i = 4; i > 0; i /= 2) bytes += __shfl_xor_sync(~0u, bytes, i);  // there are at most 8 rows
        if (lane == 0) barrier_arrive_expect(full + stage, bytes);
        __syncwarp();
        each([&](int at, const void* from, int n) { copy_bulk(to + at, from, n, full + stage); });
    }
    __device__ void start() const {
        for (int tile = 0; tile < min(x.at.stages, share.n_tiles); ++tile) load(tile, tile);
    }
    /// After a tile: the stage of the one before, which the other warps have left by now, gets its next.
    __device__ void done(int tile, const Ring& stage) const {
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + stage.at);
        const int next = tile - 1 + x.at.stages;
        if (tile == 0 || next >= share.n_tiles) return;
        const int before = stage.at == 0 ? x.at.stages - 1 : stage.at - 1;
        barrier_wait(empty + before, stage.at == 0 ? stage.parity ^ 1 : stage.parity);
        load(next, before);
    }
};

/// Eight codes as f16, multiplied with the row's scale; `low` is what of the scale f16 does not hold.
struct Q8Rows {
    static constexpr float kScale = 256;
    static __device__ uint32_t two(uint32_t codes, uint32_t selector) {  // times 2^-8
        constexpr uint32_t kSpread = 0x64646464, kShrink = 0x1c001c00,
                           kOffset = 0xc480c480;  // 2^-8, -1152/256
        return multiply_add_pair(__byte_perm(codes ^ 0x80808080, kSpread, selector), kShrink, kOffset);
    }
    static __device__ uint4 eight(uint2 codes, uint32_t high, uint32_t low) {
        const auto scaled = [&](uint32_t c) {
            return multiply_add_pair(c, high, multiply_add_pair(c, low, 0));
        };
        return {scaled(two(codes.x, 0x4140)), scaled(two(codes.x, 0x4342)), scaled(two(codes.y, 0x4140)),
                scaled(two(codes.y, 0x4342))};
    }
};
struct E4M3Rows {
    static constexpr float kScale = 1;
    static __device__ uint32_t two(uint32_t codes, uint32_t selector) {  // times 2^-8
        const uint32_t spread = __byte_perm(codes, 0, selector);         // a code in each upper byte
        return (spread & 0x80008000) | (spread & 0x7f007f00) >> 1;
    }
    static __device__ uint4 eight(uint2 codes, uint32_t high, uint32_t) {
        const auto scaled = [&](uint32_t c) { return multiply_add_pair(c, high, 0); };
        return {scaled(two(codes.x, 0x1404)), scaled(two(codes.x, 0x3424)), scaled(two(codes.y, 0x1404)),
                scaled(two(codes.y, 0x3424))};
    }
};
struct E5M2Rows {
    static constexpr float kScale = 0;  // none
    static __device__ uint4 eight(uint2 codes, uint32_t, uint32_t) {
        return {__byte_perm(codes.x, 0, 0x1404), __byte_perm(codes.x, 0, 0x3424),
                __byte_perm(codes.y, 0, 0x1404), __byte_perm(codes.y, 0, 0x3424)};
    }
};

/// The slice of a tile to f16, by the warps of a crew.
template <class Stored>
__device__ void convert_as(const AbsorbedPlane& plane, const AbsorbedShare& share, int tile,
                           const unsigned char* stage, unsigned char* to, int warp, int warps, int lane) {
    for (int column = 8 * lane; column < plane.slice; column += 8 * 32) {
        const int piece = column / 8 * plane.of_piece >> 16, within = column - piece * plane.piece;
        const unsigned char* const from = stage + plane.raw + piece * plane.raw_piece;
        for (int row = warp; row < kTileTokens; row += warps) {
            const int seen = share.seen_row(tile, row);
            uint32_t high = 0, low = 0;
            if (Stored::kScale > 0) {
                const float* const scales =
                    reinterpret_cast<const float*>(from + kTileTokens * plane.raw_row);
                const float scale = scales[seen] * Stored::kScale;
                high = pair_f16(scale, scale);
                const float rest = scale - from_f16(static_cast<uint16_t>(high));
                low = pair_f16(rest, rest);
            }
            const uint2 codes = *reinterpret_cast<const uint2*>(from + seen * plane.raw_row + within);
            *reinterpret_cast<uint4*>(to + plane.tile + row * plane.stride + 2 * column) =
                Stored::eight(codes, high, low);
        }
    }
}

__device__ inline void convert_rows(const AbsorbedPlane& plane, const AbsorbedShare& share, int tile,
                                    const unsigned char* stage, unsigned char* to, int warp, int warps,
                                    int lane) {
    switch (plane.rows.dtype) {
        case DType::Q8:
            return convert_as<Q8Rows>(plane, share, tile, stage, to, warp, warps, lane);
        case DType::FP8_E4M3:
            return convert_as<E4M3Rows>(plane, share, tile, stage, to, warp, warps, lane);
        default:
            return convert_as<E5M2Rows>(plane, share, tile, stage, to, warp, warps, lane);
    }
}

/// The residual's slice, of any type, to operands; columns that are not there become zeros.
__device__ inline void convert_residual(const Absorbed& x, const AbsorbedShare& share, int tile,
                                        const unsigned char* stage, unsigned char* to, int warp, int warps,
                                        int lane) {
    const AbsorbedPlane& plane = x.residual;
    const int first = share.rank * plane.slice, columns = columns_of(plane, share.rank);
    const unsigned char* const from = stage + plane.raw;
    for (int row = warp; row < kTileTokens; row += warps) {
        const int shift = residual_begin(plane, share, tile, row) % 16 - bytes_of(plane.rows.dtype, first);
        const HeadRow stored = {
            from + row * plane.raw_row + shift,
            from + kTileTokens * plane.raw_row + share.seen_row(tile, row) * plane.rows.head_scales};
        for (int column = lane; column < plane.slice; column += 32) {
            const float value = column < columns ? element_of(plane.rows, stored, first + column) : 0.0f;
            reinterpret_cast<uint16_t*>(to + plane.tile + row * plane.stride)[column] =
                x.bf16 ? to_bf16(value) : to_f16(value);
        }
    }
}

}  // namespace slimrt::cuda
