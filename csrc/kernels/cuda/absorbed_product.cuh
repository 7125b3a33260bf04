// Softmax weights of a tile, and their product with its rows: what every block of a team does with its slice
// of the columns once the weights of all heads are there.
#pragma once

#include "kernels/cuda/absorbed_scores.cuh"

namespace slimrt::cuda {

constexpr float kAbsorbedInfinity = __builtin_inff();

/// A slot of softmax weights: [heads][kWeightStride] bytes, then for each head what earlier sums are
/// multiplied with.
struct WeightSlot {
    unsigned char* weights;
    float* shrink;
    __device__ WeightSlot(const Absorbed& x, int slot)
        : weights(shared_memory() + x.at.weights + slot * x.at.slot_bytes),
          shrink(reinterpret_cast<float*>(weights + x.at.slot_heads * kWeightStride)) {}
};

/// One warp, one of this block's own heads, lane: row of the tile. Its weights go to all blocks of the team.
template <class Operand, class Team>
__device__ void share_weights(const Absorbed& x, const AbsorbedShare& share, const Team& team, int tile,
                              int own, float score, const Ring& slot, int lane) {
    const int head = share.rank * x.own_heads + own;
    float* const state = reinterpret_cast<float*>(shared_memory() + x.at.state) + 2 * own;  // maximum, sum
    const int64_t row = share.first_row(tile) + lane;
    constexpr float kScaled = 1;  // as queries are
    score = finish_score(x.finish, score, kScaled, share.sees(tile, lane), head, row - share.position);
    const float before = state[0];
    float high = score;
    for (int i = 16; i > 0; i /= 2) high = max(high, __shfl_xor_sync(~0u, high, i));
    high = max(high, before);
    const float reference = high == -kAbsorbedInfinity ? 0 : high;
    const uint32_t weight = Operand::pair(__expf(score - reference), 0);
    float sum = Operand::number(weight);
    for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
    const float shrink = __expf(before - reference);
    __syncwarp();
    if (lane == 0) {
        state[0] = high;
        state[1] = state[1] * shrink + sum;
    }
    __syncwarp();  // all lanes read it at the next tile

    const uint32_t pair = weight | __shfl_xor_sync(~0u, weight, 1) << 16;  // on even lanes
    team.send_weights(x, slot, head, pair, shrink, lane);
}

/// A product warp's sums: of every kProductWarps-th group of 16 columns, all heads.
template <class Operand, int kM, int kGroups>
struct Products {
    float sum[kM][kGroups][2][4] = {};
    int at[kGroups];      // where this lane's row of the group's operand begins in a tile, -1: no such group
    int stride[kGroups];  // and bytes from row to row
    const int lane;

    __device__ Products(const Absorbed& x, int warp, int lane) : lane(lane) {
        const int row = lane % 16, column = lane / 16 * 8, slice_groups = x.rows.slice / kGroupColumns;
        const int groups = slice_groups + x.residual.slice / kGroupColumns;
#pragma unroll
        for (int j = 0; j < kGroups; ++j) {
            const int group = warp + j * kProductWarps;
            const AbsorbedPlane& plane = group < slice_groups ? x.rows : x.residual;
            const int within = group < slice_groups ? group : group - slice_groups;
            stride[j] = plane.stride;
            at[j] =
                group < groups ? plane.tile + row * plane.stride + 2 * (within * kGroupColumns + column) : -1;
        }
    }

    __device__ void add(const unsigned char* tile, const WeightSlot& slot) {
        const float* const shrink = slot.shrink + lane / 4;
        bool same = true;
#pragma unroll
        for (int i = 0; i < 2 * kM; ++i) same &= shrink[8 * i] == 1;
        if (!__all_sync(~0u, same)) {
#pragma unroll
            for (int m = 0; m < kM; ++m)
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const float factor = shrink[16 * m + i % 4 / 2 * 8];
#pragma unroll
                    for (int j = 0; j < kGroups; ++j) sum[m][j][i / 4][i % 4] *= factor;
                }
        }
#pragma unroll
        for (int k = 0; k < kTileTokens / 16; ++k) {
            uint32_t a[kM][4];
#pragma unroll
            for (int m = 0; m < kM; ++m)
                load_matrices(a[m],
                              slot.weights + (16 * m + lane % 16) * kWeightStride + 32 * k + lane / 16 * 16);
#pragma unroll
            for (int j = 0; j < kGroups; ++j) {
                if (at[j] < 0) break;
                uint32_t b[4];
                load_matrices_turned(b, tile + at[j] + 16 * k * stride[j]);
#pragma unroll
                for (int m = 0; m < kM; ++m) {
                    Operand::multiply_add(sum[m][j][0], a[m], b[0], b[1]);
                    Operand::multiply_add(sum[m][j][1], a[m], b[2], b[3]);
                }
            }
        }
    }

    /// To the split's [heads][columns].
    __device__ void store(const Absorbed& x, const AbsorbedShare& share, int warp) const {
        const int slice_groups = x.rows.slice / kGroupColumns, columns = x.columns;
        float* const split =
            x.partial + (int64_t(share.sequence) * x.splits + share.split) * x.n_heads * columns;
#pragma unroll
        for (int j = 0; j < kGroups; ++j) {
            if (at[j] < 0) break;
            const int group = warp + j * kProductWarps;
            const bool own = group < slice_groups;
            const AbsorbedPlane& plane = own ? x.rows : x.residual;
            const int first = share.rank * plane.slice + (own ? group : group - slice_groups) * kGroupColumns;
#pragma unroll
            for (int m = 0; m < kM; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int head = 16 * m + lane / 4 + i % 2 * 8, column = first + i / 2 * 8 + lane % 4 * 2;
                    if (head >= x.n_heads || column >= plane.width) continue;
                    float* const to = split + int64_t(head) * columns + (own ? 0 : x.rows.width) + column;
                    const float* const two = sum[m][j][i / 2] + i % 2 * 2;
                    *reinterpret_cast<float2*>(to) = {two[0], two[1]};
                }
        }
    }
};

}  // namespace slimrt::cuda
