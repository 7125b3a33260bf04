// Scores of a tile, by the score warps of a block: of its slice's heads, read head by head, or of all heads, as its
// slice's share of a whole row.
//
// Head by head, with rotation on read. A row at position 8 o + g is turned by the rows 8 o and g of the table:
// q . R(8 o + g) k = (R(8 o)^T q) . (R(g) k). What keys are turned by stays in registers, as lane 4 g + m of a
// product always has the tokens g and g + 8; queries are turned for the four o of a tile, and become its eight
// columns, each as two f16 that add up to it.
#pragma once

#include "kernels/cuda/absorbed_rows.cuh"

namespace slimrt::cuda {

constexpr int kSteps = kMaxDim / 16;
constexpr float kBrainShrink = 1.0f / 64;  // of bf16 rows on their way to f16, made up for by the queries

/// Operands of products.
struct HalfOperand {
    static constexpr bool kBrain = false;
    static __device__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        multiply_add_f16(d, a, b0, b1);
    }
    static __device__ uint32_t pair(float low, float high) { return pair_f16(low, high); }
    static __device__ float number(uint32_t bits) { return from_f16(static_cast<uint16_t>(bits)); }
};
struct BrainOperand {
    static constexpr bool kBrain = true;
    static __device__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        multiply_add_bf16(d, a, b0, b1);
    }
    static __device__ uint32_t pair(float low, float high) { return pair_bf16(low, high); }
    static __device__ float number(uint32_t bits) { return from_bf16(static_cast<uint16_t>(bits)); }
};

/// The score warps of a block, who wait for each other.
struct Crew {
    uint64_t* barrier;
    int warp, warps, lane;
    uint32_t parity = 0;
    __device__ void meet() {
        __syncwarp();
        if (lane == 0) barrier_arrive(barrier);
        barrier_wait(barrier, parity);
        parity ^= 1;
    }
};

/// The two chunks of 8 columns that step i multiplies: where keys turn by halves (neox) partners of each other.
struct Chunks {
    int a, b;
    __device__ Chunks(const HeadScores& head, int i) {
        const int half = head.interleaved || !head.table ? 0 : head.n_rot / 16;
        a = i < half ? i : 2 * i;
        b = i < half ? i + half : 2 * i + 1;
    }
};

/// The pair that column c of a head belongs to, if it turns.
__device__ inline int pair_of(const HeadScores& head, int c) {
    return head.interleaved ? c / 2 : c % (head.n_rot / 2);
}

/// What columns c and c + 1 of a head are turned by in `rows` positions: cosines and signed sines, as the table has
/// them but for what it is scaled by.
__device__ inline uint2 turns_of(const HeadScores& head, int c, int rows) {
    float cosine[2] = {1, 1}, sine[2] = {0, 0};
    const float* const row = head.table + min(int64_t{rows}, head.table_rows - 1) * head.n_rot;
    for (int i = 0; i < 2 && c < head.n_rot; ++i) {
        const int pair = pair_of(head, c + i);
        const float scale = 1 / head.table[2 * pair];
        const bool first = head.interleaved ? i == 0 : c < head.n_rot / 2;
        cosine[i] = row[2 * pair] * scale;
        sine[i] = first ? -row[2 * pair + 1] * scale : row[2 * pair + 1] * scale;
    }
    return {pair_f16(cosine[0], cosine[1]), pair_f16(sine[0], sine[1])};
}

/// For every step and lane of a score warp the four numbers that stay the same.
__device__ inline void prepare_turns(const Absorbed& x, int thread, int threads) {
    auto* const to = reinterpret_cast<uint4*>(shared_memory() + x.at.key_turns);
    for (int i = thread; x.head.table && i < x.head.dim / 16 * 32; i += threads) {
        const Chunks chunks(x.head, i / 32);
        const int lane = i % 32, within = lane % 4 * 2;
        const uint2 a = turns_of(x.head, 8 * chunks.a + within, lane / 4);
        const uint2 b = turns_of(x.head, 8 * chunks.b + within, lane / 4);
        to[i] = {a.x, a.y, b.x, b.y};
    }
}

/// Queries turned back by the positions 8 o of a tile; `turns`: rows of the rope table, of each o one.
__device__ inline void turn_queries(const Absorbed& x, const float* turns, int heads, const Crew& crew) {
    const HeadScores& head = x.head;
    const float* const q = reinterpret_cast<const float*>(shared_memory() + x.at.q);
    const int q_row = head.dim + kPad / 2, half = head.n_rot / 2;
    auto* const to = reinterpret_cast<uint16_t*>(shared_memory() + x.at.turned_q);
    for (int i = crew.warp; i < 4 * heads; i += crew.warps) {
        const float* const from = q + i / 4 * head.dim;
        uint16_t* const high = to + (i / 4 * 8 + i % 4 * 2) * q_row;
        const auto put = [&](int c, float value) {
            high[c] = to_f16(value);
            high[c + q_row] = to_f16(value - from_f16(high[c]));
        };
        for (int pair = crew.lane; pair < head.dim / 2; pair += 32) {
            const bool turns_pair = head.table && pair < half;
            const bool apart = turns_pair && !head.interleaved;
            const int c = apart ? pair : 2 * pair, d = apart ? pair + half : c + 1;
            const float cosine = turns_pair ? turns[i % 4 * head.n_rot + 2 * pair] : 1;
            const float sine = turns_pair ? turns[i % 4 * head.n_rot + 2 * pair + 1] : 0;
            put(c, cosine * from[c] + sine * from[d]);
            put(d, cosine * from[d] - sine * from[c]);
        }
    }
}

template <class Operand>
struct HeadScorer {
    const Absorbed& x;
    const int lane;
    uint32_t turn[kSteps][4];  // cosines and signed sines of chunks a and b, for this lane's token and columns

    __device__ HeadScorer(const Absorbed& x, int lane) : x(x), lane(lane) {
        const auto* const from = reinterpret_cast<const uint4*>(shared_memory() + x.at.key_turns) + lane;
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            const bool there = x.head.table && 16 * i < x.head.dim;
            const uint4 four = there ? from[32 * i] : uint4{};
            turn[i][0] = four.x;
            turn[i][1] = four.y;
            turn[i][2] = four.z;
            turn[i][3] = four.w;
        }
    }

    /// Two numbers of a tile's row as f16.
    __device__ uint32_t as_f16(uint32_t two) const {
        if (!Operand::kBrain) return two;
        return pair_f16(from_bf16(static_cast<uint16_t>(two)) * kBrainShrink,
                        from_bf16(static_cast<uint16_t>(two >> 16)) * kBrainShrink);
    }
    __device__ uint32_t changed(uint32_t two, const uint32_t* affine, int column) const {
        const uint32_t scale = affine[column / 2], bias = affine[(x.rows.slice + column) / 2];
        return multiply_add_pair(two, scale, bias);
    }
    __device__ static uint32_t swapped(uint32_t two) { return two << 16 | two >> 16; }

    /// The 16 rows [16 half, + 16) with one query head: scores[32], still without factors.
    __device__ void score(const unsigned char* tile, int head_in_slice, int half, float* scores) const {
        const HeadScores& head = x.head;
        const unsigned char* const shared = shared_memory();
        const int column = head_in_slice / head.group * head.dim;
        const bool affine = head.row_scale || head.bias;
        const auto* const affine_of = reinterpret_cast<const uint32_t*>(shared + x.at.affine);
        const unsigned char* const row =
            tile + x.rows.tile + (16 * half + lane % 16) * x.rows.stride + 2 * column;
        const int q_row = 2 * head.dim + kPad;
        const unsigned char* const q = shared + x.at.turned_q + (8 * head_in_slice + lane % 8) * q_row;
        float sum[4] = {};
        uint32_t b[4];
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            if (16 * i >= head.dim) break;
            const Chunks chunks(head, i);
            if (i % 2 == 0) {
                const Chunks next(head, i + 1);
                const bool last = 16 * (i + 1) >= head.dim;  // then there is no next step
                const int two = lane < 16 || last ? (lane / 8 % 2 ? chunks.b : chunks.a)
                                                  : (lane / 8 % 2 ? next.b : next.a);
                load_matrices(b, q + 16 * two);
            }
            uint32_t a[4];
            load_matrices(a, row + 16 * (lane < 16 ? chunks.a : chunks.b));
#pragma unroll
            for (uint32_t& two : a) two = as_f16(two);
            if (affine) {
                const int at = column + lane % 4 * 2;
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    a[j] = changed(a[j], affine_of, at + 8 * (j < 2 ? chunks.a : chunks.b));
            }
            if (head.table) {
                uint32_t other[4] = {a[2], a[3], a[0], a[1]};
                if (head.interleaved)
#pragma unroll
                    for (int j = 0; j < 4; ++j) other[j] = swapped(a[j]);
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    if (head.interleaved || 8 * chunks.a < head.n_rot)
                        a[j] = multiply_add_pair(other[j], turn[i][j / 2 * 2 + 1],
                                                 multiply_add_pair(a[j], turn[i][j / 2 * 2], 0));
            }
            multiply_add_f16(sum, a, b[i % 2 * 2], b[i % 2 * 2 + 1]);
        }
        const int octet = lane % 4;  // of the columns that this lane has sums of
        if (octet == 2 * half) scores[16 * half + lane / 4] = sum[0] + sum[1];
        if (octet == 2 * half + 1) scores[16 * half + 8 + lane / 4] = sum[2] + sum[3];
    }
};

/// All heads' queries of a whole row, this warp's columns of the slice, as operands: `kParts` that add up.
template <class Operand, int kM, int kParts, int kWideSteps>
struct WideScorer {
    const Absorbed& x;
    const Crew& crew;
    uint32_t q[kParts][kM][kWideSteps][4];

    __device__ int step(int i) const { return crew.warp + i * crew.warps; }  // of 16 columns

    __device__ WideScorer(const Absorbed& x, const AbsorbedShare& share, const Crew& crew) : x(x), crew(crew) {
        const float* const from = x.wide.q + share.query * x.wide.q_stride + share.rank * x.rows.slice;
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
            for (int i = 0; i < kWideSteps; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int head = 16 * m + crew.lane / 4 + j % 2 * 8;
                    const int column = 16 * step(i) + crew.lane % 4 * 2 + j / 2 * 8;
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

    /// This warp's sums, to [heads][kSumStride].
    __device__ void score(const unsigned char* tile, float* sums) const {
        const int lane = crew.lane;
#pragma unroll 1
        for (int row = 0; row < kTileTokens; row += 16) {
            float sum[kM][2][4] = {};
            const unsigned char* const from =
                tile + x.rows.tile + (row + lane / 16 * 8 + lane % 8) * x.rows.stride + lane / 8 % 2 * 16;
#pragma unroll
            for (int i = 0; i < kWideSteps; ++i) {
                if (16 * step(i) >= x.rows.slice) break;
                uint32_t b[4];
                load_matrices(b, from + 32 * step(i));
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
