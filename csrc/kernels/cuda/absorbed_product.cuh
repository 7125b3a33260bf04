// Softmax weights of a tile, and their product with its rows: what each block of a team does with its slice
// once it has the weights of all heads.
#pragma once

#include "kernels/cuda/absorbed_scores.cuh"

namespace slimrt::cuda {

constexpr float kAbsorbedInfinity = __builtin_inff();

/// A slot of softmax weights: [heads][kWeightStride] bytes, then for each head the factor of earlier sums.
struct WeightSlot {
    unsigned char* weights;
    float* shrink;
    __device__ WeightSlot(const Absorbed& x, int slot)
        : weights(shared_memory() + x.at.weights + slot * x.at.slot_bytes),
          shrink(reinterpret_cast<float*>(weights + x.at.slot_heads * kWeightStride)) {}
};

/// Softmax of the own heads: what weights are relative to; for each phase that, and the sum of its weights, a
/// part of it for each lane.
struct SoftmaxState {
    float *reference, *of_phase, *sums;
    __device__ explicit SoftmaxState(const Absorbed& x)
        : reference(reinterpret_cast<float*>(shared_memory() + x.at.references)),
          of_phase(reinterpret_cast<float*>(shared_memory() + x.at.state)),
          sums(of_phase + x.phases * x.own_heads) {}
};

/// The largest number of a warp, in one instruction: as integers of the same order.
__device__ inline float max_of_warp(float x) {
    const auto ordered = [](int bits) { return bits ^ (bits >> 31 & 0x7fffffff); };
    return __int_as_float(ordered(__reduce_max_sync(~0u, ordered(__float_as_int(x)))));
}

/// Online softmax of one of the block's own heads, by one warp; lane: row of the tile. Sends the weights to
/// all blocks of the team. They are relative to the largest score so far, or to one at most kSlack smaller,
/// so that earlier sums are rarely rescaled. turn: of the phases; turns: a barrier for each phase and head,
/// which puts tiles in order.
template <class Operand, class Team>
__device__ void online_softmax(const Absorbed& x, const AbsorbedWork& work, const Team& team, int tile,
                               int own, float score, const Ring& slot, int lane, const Ring& turn,
                               uint64_t* turns) {
    constexpr float kSlack = 8;  // e^8 is far below f16's largest number
    const int head = work.rank * x.own_heads + own;
    const SoftmaxState state(x);
    const int64_t row = work.first_row(tile) + lane;
    constexpr float kScaled = 1;  // by the queries
    score = finish_score(x.finish, score, kScaled, work.visible(tile, lane), head, row - work.position);
    const float high = max_of_warp(score);
    if (x.phases > 1 && tile > 0) {
        const int earlier = turn.at == 0 ? x.phases - 1 : turn.at - 1;
        Team::wait(turns + earlier * x.own_heads + own, turn.parity() ^ (turn.at == 0));
    }
    const float before = state.reference[own];
    const float now = before == -kAbsorbedInfinity || high > before + kSlack ? high : before;
    __syncwarp();  // all lanes have read `before`
    if (lane == 0) {
        state.reference[own] = now;
        if (x.phases > 1) barrier_arrive(turns + turn.at * x.own_heads + own);
    }
    const float reference = now == -kAbsorbedInfinity ? 0 : now;
    const uint32_t weight = Operand::pair(__expf(score - reference), 0);
    const uint32_t pair = weight | __shfl_xor_sync(~0u, weight, 1) << 16;  // on even lanes
    team.send_weights(x, slot, head, pair, __expf(before - reference), lane);

    const int at = turn.at * x.own_heads + own;
    float& sum = state.sums[at * kTileTokens + lane];
    sum = sum * __expf(state.of_phase[at] - reference) + Operand::number(weight);
    __syncwarp();  // all lanes have read `of_phase`
    if (lane == 0) state.of_phase[at] = now;
    __syncwarp();  // all lanes read the reference at the next tile
}

/// A product warp's sums: all heads, every kProductWarps-th group of 16 columns.
template <class Operand, int kM, int kGroups>
struct Products {
    float sum[kM][kGroups][2][4] = {};
    int at[kGroups];      // offset of this lane's row of the group's operand in a tile; -1: no such group
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
            const int eight = (within * kGroupColumns + column) / 8;
            at[j] =
                group < groups ? plane.tile + plane.template eight_at<!Operand::kConverted>(row, eight) : -1;
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
                load_matrices_transposed(b, tile + at[j] + 16 * k * stride[j]);
#pragma unroll
                for (int m = 0; m < kM; ++m) {
                    Operand::multiply_add(sum[m][j][0], a[m], b[0], b[1]);
                    Operand::multiply_add(sum[m][j][1], a[m], b[2], b[3]);
                }
            }
        }
    }

    /// Stores the sums in the split's [heads][columns].
    __device__ void store(const Absorbed& x, const AbsorbedWork& work, int warp) const {
        const int slice_groups = x.rows.slice / kGroupColumns, columns = x.columns;
        float* const split =
            x.partial + (int64_t(work.sequence) * x.splits + work.split) * x.n_heads * columns;
#pragma unroll
        for (int j = 0; j < kGroups; ++j) {
            if (at[j] < 0) break;
            const int group = warp + j * kProductWarps;
            const bool own = group < slice_groups;
            const AbsorbedPlane& plane = own ? x.rows : x.residual;
            const int first = work.rank * plane.slice + (own ? group : group - slice_groups) * kGroupColumns;
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
