// Operands of mma; and partial scores of whole rows: all heads, one slice.
#pragma once

#include "kernels/cuda/absorbed_rows.cuh"

namespace slimrt::cuda {

/// mma operands: rows as they are stored, or (kConverted) f16 converted from codes of a byte.
struct F16Operand {
    static constexpr bool kBf16 = false, kConverted = false;
    static __device__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        multiply_add_f16(d, a, b0, b1);
    }
    static __device__ uint32_t pair(float low, float high) { return pair_f16(low, high); }
    static __device__ float number(uint32_t bits) { return from_f16(static_cast<uint16_t>(bits)); }
};
struct CodeOperand : F16Operand {
    static constexpr bool kConverted = true;
};
struct Bf16Operand {
    static constexpr bool kBf16 = true, kConverted = false;
    static __device__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        multiply_add_bf16(d, a, b0, b1);
    }
    static __device__ uint32_t pair(float low, float high) { return pair_bf16(low, high); }
    static __device__ float number(uint32_t bits) { return from_bf16(static_cast<uint16_t>(bits)); }
};

/// A warp's place among the block's score warps.
struct WarpPlace {
    int warp, warps, lane;
};

/// All heads' queries for whole rows, this warp's columns of the slice, as `kParts` operands that add up to
/// them.
template <class Operand, int kM, int kParts, int kWideSteps, bool kPanels>
struct WideScorer {
    const Absorbed& x;
    const WarpPlace& place;
    uint32_t q[kParts][kM][kWideSteps][4];

    __device__ int step(int i) const { return place.warp + i * place.warps; }  // of 16 columns

    __device__ WideScorer(const Absorbed& x, const AbsorbedWork& work, const WarpPlace& place)
        : x(x), place(place) {
        const float* const from = x.wide.q + work.query * x.wide.q_stride + work.rank * x.rows.slice;
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
            for (int i = 0; i < kWideSteps; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int head = 16 * m + place.lane / 4 + j % 2 * 8;
                    const int column = 16 * step(i) + place.lane % 4 * 2 + j / 2 * 8;
                    const bool there = head < x.n_heads && column < x.rows.slice;
                    const float* const at = from + head * x.wide.q_head + column;
                    float two[2] = {there ? at[0] * x.scale : 0, there ? at[1] * x.scale : 0};
#pragma unroll
                    for (int part = 0; part < kParts; ++part) {
                        q[part][m][i][j] = Operand::pair(two[0], two[1]);
                        two[0] -= Operand::number(q[part][m][i][j]);
                        two[1] -= Operand::number(q[part][m][i][j] >> 16);
                    }
                }
    }

    /// Stores this warp's partial scores in [heads][kSumStride].
    __device__ void score(const unsigned char* tile, float* sums) const {
        const int lane = place.lane;
#pragma unroll 1
        for (int row = 0; row < kTileTokens; row += 16) {
            float sum[kM][2][4] = {};
            const int own = row + lane / 16 * 8 + lane % 8;
#pragma unroll
            for (int i = 0; i < kWideSteps; ++i) {
                if (16 * step(i) >= x.rows.slice) break;
                uint32_t b[4];
                load_matrices(b, tile + x.rows.tile +
                                     x.rows.template eight_at<kPanels>(own, 2 * step(i) + lane / 8 % 2));
#pragma unroll
                for (int part = 0; part < kParts; ++part)
#pragma unroll
                    for (int m = 0; m < kM; ++m) {
                        Operand::multiply_add(sum[m][0], q[part][m][i], b[0], b[1]);
                        Operand::multiply_add(sum[m][1], q[part][m][i], b[2], b[3]);
                    }
            }
#pragma unroll
            for (int m = 0; m < kM; ++m)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int head = 16 * m + lane / 4 + j % 2 * 8, column = row + j / 2 * 8 + lane % 4 * 2;
                    const float* const two = sum[m][j / 2] + j % 2 * 2;
                    *reinterpret_cast<float2*>(sums + head * kSumStride + column) = {two[0], two[1]};
                }
        }
    }
};

}  // namespace slimrt::cuda
