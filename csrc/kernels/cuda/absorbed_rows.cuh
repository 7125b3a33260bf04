// Loading rows: which bytes of a tile are a block's slice, and their conversion to f16.
#pragma once

#include "kernels/cuda/absorbed_plan.h"
#include "kernels/cuda/ptx.cuh"

namespace slimrt::cuda {

/// What a block computes: the tiles [first, first + n_tiles) of a sequence, its slice of their columns.
struct AbsorbedWork {
    int rank, sequence, split;
    int64_t query, position, begin, end;  // rows [begin, end) are visible
    const int32_t* table;
    int64_t first;
    int n_tiles;

    /// Of block `rank` of team `team`.
    __device__ AbsorbedWork(const Absorbed& x, int team, int rank)
        : rank(rank), sequence(team / x.splits), split(team % x.splits) {
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
    __device__ bool visible(int tile, int row) const {
        return first_row(tile) + row >= begin && first_row(tile) + row < end;
    }
    /// The nearest visible row of a tile, which is read in place of a masked one, where anything may be.
    __device__ int nearest_visible(int tile, int row) const {
        const int64_t at = first_row(tile) + row;
        return static_cast<int>(max(begin, min(at, end - 1)) - first_row(tile));
    }
};

/// A position in a ring of n, and the parity of its barrier's phase in this round.
struct Ring {
    int n, at = 0;
    uint32_t round = 0;
    __device__ explicit Ring(int n) : n(n) {}
    __device__ uint32_t parity() const { return round & 1; }
    __device__ void next() {
        if (++at < n) return;
        at = 0;
        ++round;
    }
};

__device__ inline int columns_of(const AbsorbedPlane& plane, int rank) {
    return max(0, min(plane.slice, plane.width - rank * plane.slice));
}

/// Where a tile's rows are stored.
struct TileSource {
    const unsigned char *rows, *residual, *factors;  // blocks of the cache
    int64_t block, first;                            // of the cache; row
    int low, high;                                   // visible rows of it

    __device__ TileSource(const Absorbed& x, const AbsorbedWork& work, int tile)
        : block(work.table[work.first + tile]),
          first(work.first_row(tile)),
          low(work.nearest_visible(tile, 0)),
          high(work.nearest_visible(tile, kTileTokens - 1)) {
        rows = x.rows.rows.base + block * x.rows.rows.block_stride;
        residual = x.residual.rows.base + block * x.residual.rows.block_stride;
        factors = x.head.factors.base + block * x.head.factors.block_stride;
    }
    __device__ int nearest_visible(int row) const { return max(low, min(row, high)); }
};

/// Calls copy(to, from, bytes) for the slice of row `row` of a tile.
template <class Copy>
__device__ void copy_rows(const AbsorbedPlane& plane, bool converted, int rank, const TileSource& source,
                          int row, Copy&& copy) {
    const RowsView& rows = plane.rows;
    const unsigned char* const from = source.rows + rank * plane.slice_bytes;
    if (plane.by_heads && converted) {  // all rows at once, in eight parts
        const int part = plane.slice_bytes / 8;
        if (row % 4 == 0) copy(plane.raw + row / 4 * part, from + row / 4 * part, part);
        return;
    }
    const unsigned char* data = from + source.nearest_visible(row) * rows.head_elements;
    const int to = converted ? plane.raw : plane.tile, stride = converted ? plane.raw_row : plane.stride;
    const int bytes = bytes_of(rows.dtype, plane.piece);
    for (int i = 0; i < plane.pieces; ++i, data += (rows.head_elements + rows.head_scales) * kTileTokens)
        copy(to + row * stride + i * bytes, data, bytes);
    if (converted && rows.head_scales && row == 0)
        copy(plane.raw + kTileTokens * plane.raw_row, source.rows + kTileTokens * rows.head_elements,
             kTileTokens * rows.head_scales);
}

/// Offset of a row's slice of the residual in its block.
__device__ inline int residual_begin(const AbsorbedPlane& plane, int rank, int nearest_visible) {
    return nearest_visible * plane.rows.head_elements + bytes_of(plane.rows.dtype, rank * plane.slice);
}

/// The same for the residual, whose rows begin at any byte: copies of 16 bytes reach beyond them.
template <class Copy>
__device__ void copy_residual(const AbsorbedPlane& plane, int rank, const TileSource& source, int row,
                              Copy&& copy) {
    const int columns = columns_of(plane, rank);
    if (columns == 0) return;
    const int begin = residual_begin(plane, rank, source.nearest_visible(row));
    const int end = begin + bytes_of(plane.rows.dtype, columns), aligned = begin / 16 * 16;
    const int whole = kTileTokens * plane.rows.head_elements;
    copy(plane.raw + row * plane.raw_row, source.residual + aligned,
         (min(end, whole) + 15) / 16 * 16 - aligned);
    if (plane.rows.head_scales && row == 0)
        copy(plane.raw + kTileTokens * plane.raw_row, source.residual + whole,
             kTileTokens * plane.rows.head_scales);
}

/// And for other operands of scores: the RoPE table's row of every eighth token, and the rows' factors.
template <class Copy>
__device__ void copy_score_operands(const Absorbed& x, int rank, const TileSource& source, int row,
                                    Copy&& copy) {
    const HeadScores& head = x.head;
    if (head.table && row % 8 == 0) {
        const int64_t rope_row = min(source.first + row, head.table_rows - 1);
        copy(x.at.rope_rows + row / 8 * head.n_rot * 4, head.table + rope_row * head.n_rot, head.n_rot * 4);
    }
    if (!head.has_factors || row > 0) return;
    const int bytes = head.factors_of_slice() * kTileTokens * 4;
    copy(x.at.factors, source.factors + (head.head_factors ? rank * bytes : 0), bytes);
}

/// All copies for row `row` of a tile, but for planes that are loaded at once.
template <class Copy>
__device__ void copy_slice(const Absorbed& x, int rank, const TileSource& source, int row, Copy&& copy) {
    if (!x.rows.at_once) copy_rows(x.rows, x.converted, rank, source, row, copy);
    if (x.residual.width) copy_residual(x.residual, rank, source, row, copy);
    copy_score_operands(x, rank, source, row, copy);
}

/// The warps that empty a stage and refill it: member `warp` of `warps`. A Team has each warp load some rows,
/// or one warp load the whole stage. They have every `phases`-th tile.
template <class Team>
struct Loader {
    const Absorbed& x;
    const AbsorbedWork& work;
    uint64_t *full, *empty;
    int warp, warps, phases, lane;
    uint32_t loads = 0;  // a bit for each stage that this warp loads something to

    __device__ Loader(const Absorbed& x, const AbsorbedWork& work, const auto& barriers, int warp, int warps,
                      int phases, int lane)
        : x(x),
          work(work),
          full(barriers.full),
          empty(barriers.empty),
          warp(warp),
          warps(warps),
          phases(phases),
          lane(lane) {
        for (int stage = 0; stage < x.at.stages; ++stage)
            if (!Team::kOneWarpLoads || stage % warps == warp) loads |= 1u << stage;
    }
    /// How many arrivals `full` expects.
    static __device__ int arrivals(int warps) { return Team::kOneWarpLoads ? 1 : warps * 32; }

    __device__ void load(int tile, int stage) const {
        if (loads >> stage & 1)
            Team::load_tile(x, work.rank, TileSource(x, work, tile), warp, warps,
                            shared_memory() + stage * x.at.stage_bytes, full + stage, lane);
    }
    __device__ void start(int phase) const {
        for (int tile = phase; tile < min(x.at.stages, work.n_tiles); tile += phases) load(tile, tile);
    }
    /// After a tile: refills the stage of their last one, which the other warps have left by now.
    __device__ void done(int tile, const Ring& stage) const {
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + stage.at);
        const bool earlier = stage.at < phases;  // in the round before this one
        const int before = stage.at - phases + (earlier ? x.at.stages : 0),
                  next = tile - phases + x.at.stages;
        if (tile < phases || next >= work.n_tiles || !(loads >> before & 1)) return;
        Team::wait(empty + before, stage.parity() ^ earlier);
        load(next, before);
    }
};

/// Eight codes as f16, times the row's scale; `low`: what f16 rounds off that scale.
template <class Row>
struct Halves;
template <>
struct Halves<RowQ8> {
    static constexpr float kScale = 256;
    static __device__ uint32_t two(uint32_t codes, uint32_t selector) {  // times 2^-8
        // kShrink: 2^-8, kOffset: -1152 / 256
        constexpr uint32_t kSpread = 0x64646464, kShrink = 0x1c001c00, kOffset = 0xc480c480;
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
template <>
struct Halves<RowE4M3> {
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
template <>
struct Halves<RowE5M2> {
    static constexpr float kScale = 0;  // none
    static __device__ uint4 eight(uint2 codes, uint32_t, uint32_t) {
        return {__byte_perm(codes.x, 0, 0x1404), __byte_perm(codes.x, 0, 0x3424),
                __byte_perm(codes.y, 0, 0x1404), __byte_perm(codes.y, 0, 0x3424)};
    }
};

/// What a warp converts of a tile's slice: columns of every `step`-th row. In blank_rows() every `step`-th
/// eight of columns.
struct TilePart {
    int column, columns, row, step;
};

/// A row's scale as two f16 that add up to it with a relative error of 2^-22.
__device__ inline uint32_t split_scale(float scale) {
    const uint32_t high = pair_f16(scale, 0);
    return high | pair_f16(0, scale - from_f16(static_cast<uint16_t>(high)));
}

/// Converts columns [column, column + columns) of a piece at `from` to f16, eight at a time. A lane has the
/// same eight in row after row, and loads several before it converts them. to: column 0 of the tile's first
/// row.
template <class Stored>
__device__ void convert_as(const AbsorbedPlane& plane, const AbsorbedWork& work, int tile,
                           const unsigned char* from, unsigned char* to, const TilePart& part, int lane) {
    const int low_row = work.nearest_visible(tile, 0), high_row = work.nearest_visible(tile, kTileTokens - 1);
    const int eights = part.columns / 8, own_row = lane * plane.of_unit >> 16;
    constexpr int kBatch = 4;
    const int at_once = max(1, 32 * plane.of_unit >> 16), rows = kTileTokens / part.step;
    const int next = at_once * part.step;  // rows
    const auto* const scale_of = reinterpret_cast<const float*>(from + kTileTokens * plane.raw_row);
    uint32_t scale = 0;
    if (Stored::kScale > 0) scale = split_scale(scale_of[work.nearest_visible(tile, lane)] * Stored::kScale);
#pragma unroll 1
    for (int base = 0; base < eights; base += 32) {
        const int eight = base + lane - own_row * eights;
        const int own_rows = eight < eights && own_row < at_once ? rows - own_row : 0;
        const unsigned char* const own_codes = from + part.column + 8 * min(eight, eights - 1);
        unsigned char* halves = to + 16 * eight + (part.row + own_row * part.step) * plane.stride;
#pragma unroll 1
        for (int i = 0; i < rows; i += kBatch * at_once) {
            uint2 codes[kBatch];
            uint32_t scales[kBatch];
            const int row = part.row + (i + own_row) * part.step;
#pragma unroll
            for (int j = 0; j < kBatch; ++j) {
                const int of_batch = (row + j * next) & (kTileTokens - 1);  // beyond the tile: not stored
                codes[j] = *reinterpret_cast<const uint2*>(own_codes + max(low_row, min(of_batch, high_row)) *
                                                                           plane.raw_row);
                scales[j] = Stored::kScale > 0 ? __shfl_sync(~0u, scale, of_batch) : 0;
            }
#pragma unroll
            for (int j = 0; j < kBatch; ++j) {
                const uint4 eight_halves = Stored::eight(codes[j], __byte_perm(scales[j], 0, 0x1010),
                                                         __byte_perm(scales[j], 0, 0x3232));
                if (i + j * at_once < own_rows)
                    *reinterpret_cast<uint4*>(halves + j * next * plane.stride) = eight_halves;
            }
            halves += kBatch * next * plane.stride;
        }
    }
}

/// Piece after piece.
template <class Stored>
__device__ void convert_pieces(const AbsorbedPlane& plane, const AbsorbedWork& work, int tile,
                               const unsigned char* stage, unsigned char* to, const TilePart& part,
                               int lane) {
    TilePart of_piece = part;
    of_piece.columns = min(part.columns, plane.piece);
    for (int column = part.column; column < part.column + part.columns; column += plane.piece) {
        const int piece = column / 8 * plane.of_piece >> 16;
        of_piece.column = column - piece * plane.piece;
        convert_as<Stored>(plane, work, tile, stage + plane.raw + piece * plane.raw_piece,
                           to + plane.tile + 2 * column, of_piece, lane);
    }
}

__device__ inline void convert_rows(const AbsorbedPlane& plane, const AbsorbedWork& work, int tile,
                                    const unsigned char* stage, unsigned char* to, const TilePart& part,
                                    int lane) {
    with_row_type(plane.rows.dtype, [&]<class Row>(Row) {
        if constexpr (sizeof(typename Row::Code) == 1 && Row::kGroup == 0)
            convert_pieces<Halves<Row>>(plane, work, tile, stage, to, part, lane);
    });
}

/// Zeros for masked rows of panels, in the columns of `part`: TMA loads these rows, too, and anything may be
/// there. False: all rows are visible.
__device__ inline bool blank_rows(const AbsorbedPlane& plane, const AbsorbedWork& work, int tile,
                                  unsigned char* to, const TilePart& part, int lane) {
    static_assert(kTileTokens == 32);
    if (work.visible(tile, 0) && work.visible(tile, kTileTokens - 1)) return false;
    if (work.visible(tile, lane)) return true;
    for (int i = part.row; i < part.columns / 8; i += part.step)
        *reinterpret_cast<uint4*>(to + plane.tile +
                                  plane.template eight_at<true>(lane, part.column / 8 + i)) = {};
    return true;
}

/// Converts the residual's slice, of any type, to operands; columns beyond the last become zeros.
__device__ inline void convert_residual(const Absorbed& x, const AbsorbedWork& work, int tile,
                                        const unsigned char* stage, unsigned char* to, int warp, int warps,
                                        int lane) {
    const AbsorbedPlane& plane = x.residual;
    const int first = work.rank * plane.slice, columns = columns_of(plane, work.rank);
    const unsigned char* const from = stage + plane.raw;
    for (int row = warp; row < kTileTokens; row += warps) {
        const int shift = residual_begin(plane, work.rank, work.nearest_visible(tile, row)) % 16 -
                          bytes_of(plane.rows.dtype, first);
        const HeadRow stored = {
            from + row * plane.raw_row + shift,
            from + kTileTokens * plane.raw_row + work.nearest_visible(tile, row) * plane.rows.head_scales};
        for (int column = lane; column < plane.slice; column += 32) {
            const float value = column < columns ? element_of(plane.rows, stored, first + column) : 0.0f;
            reinterpret_cast<uint16_t*>(to + plane.tile + row * plane.stride)[column] =
                x.bf16 ? to_bf16(value) : to_f16(value);
        }
    }
}

}  // namespace slimrt::cuda
