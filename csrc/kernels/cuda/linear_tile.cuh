// A tile of tokens by rows of the weight, multiplied by mma with f32 sums: the layout of 16-bit numbers in
// shared memory, which threads copy them there, and which warps multiply them.
//
// A stage has kDepth elements of k of the tile's tokens, or rows, in pieces of 16 bytes. The pieces of a row
// are permuted by an XOR with the row (swizzled), so that eight rows' pieces of one column have no bank
// conflicts, without padding, for ldmatrix and for writers.
#pragma once

#include "kernels/cuda/linear_weights.cuh"

namespace slimrt::cuda {

/// Of a block; its warps are two along tokens by four along rows.
constexpr int kTileThreads = 256, kTileWarps = kTileThreads / kWarp;

template <int tokens, int rows>
struct TileShape {
    static constexpr int kTokens = tokens, kRows = rows;
    static constexpr int kDepth = 16 * kTileThreads / rows;  // a thread unpacks 16 weights of a stage
    static constexpr int kRowBytes = 2 * kDepth, kPieces = kRowBytes / kPiece;
    static constexpr int kTokenBytes = tokens * kRowBytes, kWeightBytes = rows * kRowBytes;
    static constexpr int kAtOnce = kTileThreads / kPieces;  // rows whose pieces the threads copy at once

    /// Offset of a row's piece in a stage; 16 rows further it is the same, but for the rows between.
    static __device__ int at(int row, int piece) {
        return row * kRowBytes + (piece ^ unsigned(row) * kPieces / 8 % kPieces) * kPiece;
    }
};

/// A block's work: a tile's rows by tokens [token, end), along chunks [first, last) of k.
struct Share {
    Tile tile;
    int token, end, first, last;

    /// The row of rounded x of a token; -1 beyond the last.
    __device__ int place(const Job& job, int sibling, int index) const {
        if (index >= end) return -1;
        if (job.order) return job.order[index] / job.share;
        return index * job.all_heads() + columns_at(job, tile.head, sibling);
    }
};

/// What all threads of a block need, in shared memory to save registers.
struct TileHead {
    Share share;
    int too_large;  // whether a weight could exceed f16
};

/// Copies x, stage after stage: a thread copies a piece of every kAtOnce-th token of the tile, zeros for
/// missing ones (`places`: -1).
template <class S>
class CopiesOfTokens {
    static constexpr int kCount = S::kTokens / S::kAtOnce;
    const uint16_t* from_[kCount];
    bool there_[kCount];
    int to_;

  public:
    __device__ CopiesOfTokens(const Rounded& x, const int* places, int step) {
        const int first = threadIdx.x / S::kPieces, piece = threadIdx.x % S::kPieces;
        to_ = S::at(first, piece);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const int place = places[first + i * S::kAtOnce];
            there_[i] = place >= 0;
            from_[i] = x.x + size_t(max(place, 0)) * x.stride + step * S::kDepth + piece * kPiece / 2;
        }
    }
    __device__ void copy(unsigned char* stage) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            copy16(stage + to_ + i * S::kAtOnce * S::kRowBytes, from_[i], there_[i]);
            from_[i] += S::kDepth;
        }
    }
};

/// Likewise weights in 16 bits whose rows are whole pieces; zeros beyond them.
template <class S>
class CopiesOfRows {
    static constexpr int kCount = S::kRows / S::kAtOnce;
    const unsigned char* from_;
    size_t next_;      // bytes from a row to the next one that this thread copies
    int rows_, left_;  // rows that exist; bytes left of a row
    int to_;

  public:
    __device__ CopiesOfRows(const Job& job, const Tile& tile, size_t row_bytes, int step) {
        const int first = threadIdx.x / S::kPieces, piece = threadIdx.x % S::kPieces;
        const int at = step * S::kRowBytes + piece * kPiece;
        from_ = weight_row(job, tile, tile.row + first) + at;
        next_ = S::kAtOnce * job.parts[tile.part].stride;
        rows_ = job.parts[tile.part].rows - tile.row - first;
        left_ = int(row_bytes) - at;
        to_ = S::at(first, piece);
    }
    __device__ void copy(unsigned char* stage) {
#pragma unroll
        for (int i = 0; i < kCount; ++i)
            copy16(stage + to_ + i * S::kAtOnce * S::kRowBytes, from_ + i * next_,
                   left_ > 0 && i * S::kAtOnce < rows_);
        from_ += S::kRowBytes;
        left_ -= S::kRowBytes;
    }
};

/// A warp's part of a tile: kA times 16 tokens by 16 kB rows of the weight, from `token` and `row` on.
template <class S>
struct WarpTile {
    static constexpr int kA = S::kTokens / 32, kB = S::kRows / 64;
    float sums[kA][2 * kB][4];
    int token, row, lane;

    __device__ WarpTile() {
        const int warp = threadIdx.x / kWarp;
        lane = threadIdx.x % kWarp;
        token = warp % 2 * kA * 16;
        row = warp / 2 * kB * 16;
    }
    __device__ void clear() {
        for (auto& a : sums)
            for (auto& b : a)
                for (float& x : b) x = 0;
    }

    /// sums += the products of a stage.
    template <bool bf16>
    __device__ void multiply(const unsigned char* tokens, const unsigned char* weights) {
        const int eight = lane / 8, in_eight = lane % 8;
        const int a_at = S::at(token + eight % 2 * 8 + in_eight, eight / 2);
        const int b_at = S::at(row + eight / 2 * 8 + in_eight, eight % 2);
#pragma unroll
        for (int k = 0; k < S::kDepth; k += 16) {
            uint32_t a[kA][4], b[kB][4];
#pragma unroll
            for (int j = 0; j < kB; ++j)
                load_matrices(b[j], weights + (b_at ^ 2 * k) + 16 * j * S::kRowBytes);
#pragma unroll
            for (int i = 0; i < kA; ++i) load_matrices(a[i], tokens + (a_at ^ 2 * k) + 16 * i * S::kRowBytes);
#pragma unroll
            for (int i = 0; i < kA; ++i) {
#pragma unroll
                for (int j = 0; j < 2 * kB; ++j) {
                    const uint32_t b0 = b[j / 2][j % 2 * 2], b1 = b[j / 2][j % 2 * 2 + 1];
                    if constexpr (bf16)
                        multiply_add_bf16(sums[i][j], a[i], b0, b1);
                    else
                        multiply_add_f16(sums[i][j], a[i], b0, b1);
                }
            }
        }
    }

    /// The same of split numbers (linear_job.cuh): three products of two parts each, without the one of both
    /// low ones. Tensor cores truncate sums, so each 16 of k are added to the others' outside of them.
    __device__ void multiply_split(const unsigned char* tokens, const unsigned char* weights) {
        constexpr int kLow = 2 * kSplitRun;  // bytes from high parts to low ones
        const int eight = lane / 8, in_eight = lane % 8;
        const int a_at = S::at(token + eight % 2 * 8 + in_eight, eight / 2);
        const int b_at = S::at(row + eight / 2 * 8 + in_eight, eight % 2);
#pragma unroll
        for (int k = 0; k < S::kRowBytes; k += 2 * kLow) {
            uint32_t high[kB][4], low[kB][4];
#pragma unroll
            for (int j = 0; j < kB; ++j) {
                load_matrices(high[j], weights + (b_at ^ k) + 16 * j * S::kRowBytes);
                load_matrices(low[j], weights + (b_at ^ (k + kLow)) + 16 * j * S::kRowBytes);
            }
#pragma unroll
            for (int i = 0; i < kA; ++i) {
                uint32_t a_high[4], a_low[4];
                load_matrices(a_high, tokens + (a_at ^ k) + 16 * i * S::kRowBytes);
                load_matrices(a_low, tokens + (a_at ^ (k + kLow)) + 16 * i * S::kRowBytes);
#pragma unroll
                for (int j = 0; j < 2 * kB; ++j) {
                    const uint32_t* const b = &high[j / 2][j % 2 * 2];
                    const uint32_t* const b_low = &low[j / 2][j % 2 * 2];
                    float sum[4];
                    multiply_f16(sum, a_low, b[0], b[1]);
                    multiply_add_f16(sum, a_high, b_low[0], b_low[1]);
                    multiply_add_f16(sum, a_high, b[0], b[1]);
#pragma unroll
                    for (int n = 0; n < 4; ++n) sums[i][j][n] += sum[n];
                }
            }
        }
    }
};

}  // namespace slimrt::cuda
