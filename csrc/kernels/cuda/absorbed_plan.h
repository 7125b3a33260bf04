// How an absorbed attention is divided, as the host plans it and kernels read it. A team of blocks takes a
// split of a sequence; each of its blocks a slice of the columns and an equal share of the heads.
#pragma once

#include <cuda.h>

#include "kernels/cuda/finish_score.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/rows.cuh"

namespace slimrt::cuda {

inline constexpr int kTileTokens = 32;    // a tile is a block of the cache
inline constexpr int kGroupColumns = 16;  // of two mma of 8 columns
inline constexpr int kMaxSlice = 512, kMaxDim = 128;
inline constexpr int kProductWarps = 8;
/// For so many query heads; registers are for 16 warps a block, with more heads for 12.
__host__ __device__ constexpr int score_warps_of(int n_heads) { return n_heads > 32 ? 4 : 8; }
inline constexpr int kWeightStride = 80;  // bytes between heads of 32 softmax weights, without bank conflicts
inline constexpr int kSumStride = 36;     // floats between heads of 32 partial scores
inline constexpr int kPartSlots = 4;      // tiles whose partial scores may be in flight
inline constexpr int kPad = 16;  // bytes after a row of a tile, so that 8 rows have no bank conflicts
/// Or a tile is panels of 64 columns, [kTileTokens][kPanelRow], as TMA loads boxes (tensor_map.h).
inline constexpr int kPanelColumns = 64, kPanelRow = 128, kPanelBytes = kTileTokens * kPanelRow;
inline constexpr int kPanelAlign = 8 * kPanelRow;

/// A plane whose columns are divided among the blocks of a team.
struct AbsorbedPlane {
    RowsView rows;
    int width = 0, slice = 0;   // columns; a block's columns (the last blocks may have fewer)
    bool by_heads = false;      // stored by heads, of which a slice has whole ones
    int slice_bytes = 0;        // from slice to slice in a block of the cache
    int tile = 0, stride = 0;   // offset in a tile of operands, and bytes from row to row there
    bool panels = false;        // the tile is made of panels
    bool at_once = false;       // clusters: one copy loads a slice of all rows
    int raw = 0;                // if converted: offset in a stage, as stored, of pieces, each
    int pieces = 1, piece = 0;  // of so many columns, a stored head or the slice,
    int of_piece = 0;           // columns [8 i, 8 i + 8) are in piece i * of_piece / 2^16
    int of_unit = 0;            // i * of_unit / 2^16: i divided by what a warp converts of a piece, in eights
    int raw_row = 0;            // bytes from row to row of a piece,
    int raw_piece = 0;          // and from piece to piece, with scales

    /// Offset of columns [8 i, 8 i + 8) of a row in the tile, in panels by TMA's swizzle of 128 bytes.
    /// kPanels: whether there may be panels.
    template <bool kPanels>
    __device__ int eight_at(int row, int i) const {
        if (!kPanels || !panels) return row * stride + 16 * i;
        return (i >> 3) * kPanelBytes + row * kPanelRow + ((row ^ i) & 7) * 16;
    }
};

/// Bits of an element, for types of operands and residuals.
__host__ __device__ inline int bits_of(DType dtype) {
    switch (dtype) {
        case DType::F16:
        case DType::BF16:
            return 16;
        case DType::Q4:
            return 4;
        case DType::Q3:
            return 3;
        case DType::Q2:
            return 2;
        default:
            return 8;
    }
}
/// Bytes of columns that begin with a group.
__host__ __device__ inline int bytes_of(DType dtype, int columns) {
    return (columns * bits_of(dtype) + 7) / 8;
}

/// A score term whose keys are read by heads.
struct HeadScores {
    const float *q = nullptr, *row_scale = nullptr, *bias = nullptr, *table = nullptr;
    int64_t q_stride = 0;                 // floats from token to token
    int q_head = 0;                       // and from head to head
    int n_heads = 0, dim = 0, group = 1;  // group: query heads of a stored head
    int per_slice = 0;                    // query heads whose columns a slice holds
    int64_t table_rows = 0;
    int n_rot = 0;
    bool interleaved = false, has_factors = false;
    bool head_factors = false;  // a factor for each head of a row, else one for all
    RowsView factors;
    const float *fresh = nullptr, *fresh_factors = nullptr;
    int64_t fresh_stride = 0, factors_stride = 0;

    __host__ __device__ int factors_of_slice() const { return head_factors ? per_slice / group : 1; }
};

/// A score term that is read as a whole row for every head.
struct WideScores {
    const float *q = nullptr, *fresh = nullptr;
    int64_t q_stride = 0, fresh_stride = 0;
    int q_head = 0, dim = 0;
};

struct AbsorbedValues {
    const float* fresh = nullptr;
    float* out = nullptr;
    int64_t fresh_stride = 0, out_stride = 0;
    int out_head = 0;  // floats from head to head of out
};

/// Byte offsets into a block's shared memory.
struct AbsorbedLayout {
    int stages, stage_bytes;                     // stages, as copies fill them
    int rope_rows, factors;                      // in a stage: rows of the RoPE table, factors of rows
    int tiles, n_tiles, tile_bytes;              // operands; where nothing is converted the stages themselves
    int weights, slots, slot_heads, slot_bytes;  // softmax weights of a tile, then factors of earlier sums
    int q, key_rotations, affine, scores, sums, parts, references, state, barriers;
    int bytes;
};

/// What blocks of a team without clusters exchange, in device memory, and how much of it a team has; teams
/// that run at once have their own. counts and words are contiguous and begin as zeros.
struct AbsorbedExchange {
    uint32_t* counts = nullptr;  // of partial scores: [team][owner][slot], each on kCountBytes
    uint64_t* words = nullptr;   // [team][slot][head][kExchangeWords]
    float* parts = nullptr;      // [team][owner][slot][rank][own head][kTileTokens]
    int team_counts = 0, team_words = 0, team_parts = 0;
};
inline constexpr int kCountBytes = 32;
inline constexpr int kMaxSplits = 128;
/// Two softmax weights a word, then the factor of earlier sums.
inline constexpr int kExchangeWords = kTileTokens / 2 + 1;

struct Absorbed {
    const PlacedSequence* placed;
    int query_shift;
    int n_heads, own_heads, team, splits, sequences;
    int workers;      // score warps that share a tile: by heads, or all of them
    int phases;       // groups of such warps, which take tiles in turn
    int teams;        // teams that run at once
    int first_team;   // of a launch, where teams are no clusters
    bool via_memory;  // teams are no clusters: they use `exchange`
    float scale;
    int64_t window;
    AbsorbedPlane rows, residual;  // residual.width == 0: none
    bool bf16, converted;          // type of the operands; whether rows must be converted to f16
    HeadScores head;               // dim == 0: none
    WideScores wide;               // dim == 0: none
    ScoreFinish finish;
    AbsorbedValues values[2];
    float* lse;
    int64_t lse_stride;
    bool merge;             // out and lse hold the result over earlier rows
    float *partial, *ends;  // [sequence][split][head][columns]; [..][head][maximum, sum]
    AbsorbedLayout at;
    AbsorbedExchange exchange;
    CUtensorMap boxes;  // TMA descriptor of rows in panels

    int columns;  // of rows and residual together
};

/// What teams compute: with clusters on sm_90a (absorbed_sm90.cu), or with blocks that exchange data through
/// device memory (absorbed_sm80.cu).
void absorbed_clusters(const Device& device, const Absorbed& x);
void absorbed_teams(const Device& device, const Absorbed& x);
/// The merge after that: absorbed_merge.cu.
void absorbed_merge(const Device& device, const Absorbed& x);

}  // namespace slimrt::cuda
