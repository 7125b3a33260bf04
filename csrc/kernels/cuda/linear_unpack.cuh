// Unpacks quantised weights to a tile's stages of f16: scale * code - minimum in f32, rounded once.
//
// A warp does so for rows of its own, from bytes to f16, without waiting for the block: it copies a chunk's
// bytes (256 elements of k), unpacks the chunk's scales, then a stage at a time, and copies the next chunk's
// bytes to the same place while the last stage of the old one is multiplied.
#pragma once

#include "kernels/cuda/linear_tile.cuh"

namespace slimrt::cuda {

/// Layout of a block's memory for unpacking, in bytes.
template <class W, class S>
struct UnpackLayout {
    static constexpr int kStageAt = 0;  // two stages
    static constexpr int kScaleAt = 2 * S::kWeightBytes;
    static constexpr int kStagedAt = kScaleAt + 4 * W::kScales * (1 + W::kMins) * S::kRows;
    static constexpr int kBytes = kStagedAt + S::kRows * kRowSpace<W>;
};

/// Writes the scales, and minima, of a row's chunk times `factor`, `step` apart; returns whether a weight
/// could exceed f16.
template <class W>
__device__ inline bool scales_of_row(const unsigned char* from, float* to, int step, float factor) {
    constexpr float kLargestF16 = 65504;
    float scale[W::kScales], largest = 0;
    W::scales(from, scale);
#pragma unroll
    for (int i = 0; i < W::kScales; ++i) {
        largest = fmaxf(largest, fabsf(scale[i]) * W::kLargest);
        to[i * step] = scale[i] * factor;
    }
    if constexpr (W::kMins) {
        uint32_t codes[W::kScales / 2];
        const float each = W::minima(from, codes) * factor;
        float most = W::kLargestMinimum;
#pragma unroll
        for (int i = 0; i < W::kScales; ++i) {
            const float code = from_f16(uint16_t(codes[i / 2] >> i % 2 * 16));
            if (W::kLargestMinimum == 0) most = fmaxf(most, fabsf(code));
            to[(W::kScales + i) * step] = each * code;
        }
        largest += fabsf(each) * most;
    }
    return largest > kLargestF16;
}

/// Four weights, of what codes() gave, with their scale and minimum.
__device__ inline uint2 four_weights(uint2 codes, float scale, float minimum) {
    const auto weight = [&](uint32_t code) { return scale * from_f16(uint16_t(code)) - minimum; };
    return {pair_f16(weight(codes.x & 0xffff), weight(codes.y & 0xffff)),
            pair_f16(weight(codes.x >> 16), weight(codes.y >> 16))};
}

template <class W, class S>
class Unpacker {
    using L = UnpackLayout<W, S>;
    static constexpr int kRows = S::kRows / kTileWarps, kLanes = kWarp / kRows;  // of a warp; of a row
    static constexpr unsigned kSubs = W::kChunk / S::kDepth;
    const Job& job_;
    TileHead& head_;
    const size_t row_bytes_;
    const float factor_;
    const int lane_, first_;  // first_: row of the tile that is the warp's first
    unsigned char* const memory_;
    unsigned skew_;  // of the lane's row: bytes after a multiple of 16

  public:
    /// Weights are multiplied by `factor`. Sets head.too_large if one could exceed f16.
    __device__ Unpacker(const Job& job, TileHead& head, size_t row_bytes, float factor, unsigned char* memory)
        : job_(job),
          head_(head),
          row_bytes_(row_bytes),
          factor_(factor),
          lane_(threadIdx.x % kWarp),
          first_(threadIdx.x / kWarp * kRows),
          memory_(memory) {
        const Tile rows = tile();
        skew_ = reinterpret_cast<uintptr_t>(weight_row(job, rows, rows.row + lane_ / kLanes)) % kPiece;
    }

    /// Starts the copy of a chunk's bytes, if the share has it.
    __device__ void stage(int chunk) const {
        if (chunk < head_.share.last)
            stage_rows<W>(staged(), job_, tile(), kRows, size_t(chunk) * W::kChunkBytes, row_bytes_, lane_,
                          kWarp);
    }
    __device__ unsigned char* at(unsigned step) const {
        return memory_ + L::kStageAt + step % 2 * S::kWeightBytes;
    }
    /// Unpacks the stage of a step; steps come in order.
    __device__ void unpack(unsigned step) const {
        const unsigned chunk = step / kSubs, sub = step % kSubs;
        if (sub == 0) {
            wait_copies<0>();
            __syncwarp();
            const unsigned skew = __shfl_sync(~0u, skew_, lane_ * kLanes % kWarp);
            const Tile rows = tile();
            if (lane_ < kRows && rows.row + lane_ < job_.parts[rows.part].rows)
                unpack_scales(row_at(lane_, skew, chunk));
            __syncwarp();
        }
        unpack_codes(at(step), row_at(lane_ / kLanes, skew_, chunk), sub);
        if (sub + 1 < kSubs) return;
        __syncwarp();
        stage(int(chunk) + 1);
    }

  private:
    /// The warp's rows.
    __device__ Tile tile() const {
        const Tile& all = head_.share.tile;
        return {all.part, all.head, all.row + first_};
    }
    __device__ unsigned char* staged() const { return memory_ + L::kStagedAt + first_ * kRowSpace<W>; }
    __device__ const unsigned char* row_at(int row, unsigned skew, unsigned chunk) const {
        return staged() + row * kRowSpace<W> + (skew + chunk * W::kChunkBytes) % kPiece;
    }
    __device__ float* scales(int row) const {
        return reinterpret_cast<float*>(memory_ + L::kScaleAt) + first_ + row;
    }

    /// Unpacks the scales, and minima, of the lane's row.
    __device__ void unpack_scales(const unsigned char* from) const {
        const bool too_large = scales_of_row<W>(from, scales(lane_), S::kRows, factor_);
        if (too_large && factor_ == 1) atomicExch(&head_.too_large, 1);  // other threads may do so, too
    }

    /// Unpacks 16 weights of the lane's row, four at a time; lanes whose rows share banks do so in other
    /// orders.
    __device__ void unpack_codes(unsigned char* to, const unsigned char* from, unsigned sub) const {
        const int row = lane_ / kLanes, part = lane_ % kLanes, order = part + row / 8 * kLanes;
        const int group = int(sub) * S::kDepth / kGroup + part / 2, s = part % 2;
        const int of = W::kScales * 16 == W::kChunk ? 2 * group + s : group;
        const float scale = scales(row)[of * S::kRows];
        const float minimum = W::kMins ? scales(row)[(W::kScales + of) * S::kRows] : 0.0f;
        const int piece = S::at(first_ + row, 2 * part);  // of two pieces that differ in one bit
        uint2 codes[4];
#pragma unroll
        for (int m = 0; m < 4; ++m) codes[m] = W::codes(from, group, s, m ^ order);
#pragma unroll
        for (int m = 0; m < 4; ++m)
            *reinterpret_cast<uint2*>(to + (piece ^ 8 * (m ^ order))) =
                four_weights(codes[m], scale, minimum);
    }
};

}  // namespace slimrt::cuda
