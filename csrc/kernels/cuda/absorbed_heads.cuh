// Scores of a tile that are read head by head, of the heads of a block's slice.
//
// With rotation on read: a row at position 8 o + g is turned by the rows 8 o and g of the table,
// q . R(8 o + g) k = (R(8 o)^T q) . (R(g) k). What keys are turned by stays in registers, as lane 4 g + m of
// a product always has the tokens g and g + 8; queries are turned for the four o of a tile, and become the
// eight columns of a product, each as two f16 that add up to it.
#pragma once

#include "kernels/cuda/absorbed_scores.cuh"

namespace slimrt::cuda {

constexpr int kSteps = kMaxDim / 16;  // of 16 columns

/// Keys are multiplied as f16: from bf16 shrunk into its range, which queries make up for.
template <class Operand>
constexpr float key_unit = Operand::kBrain ? 1.0f / 64 : 1.0f;

enum class Turning { none, halves, neighbours };  // no rotation, pairs (i, i + n_rot / 2), (2 i, 2 i + 1)

/// Whether keys are turned in f32. Those of a byte, which are f16 by now, are turned as they are.
template <class Operand>
__device__ bool turns_exactly(const Absorbed& x) {
    return Operand::kBrain || !x.converted;
}

/// Chunks of 8 columns that step i multiplies: partners of each other where pairs are halves apart.
struct Chunks {
    int a, b;
    __device__ Chunks(int half, int i) : a(i < half ? i : 2 * i), b(i < half ? i + half : 2 * i + 1) {}
};

/// Chunks in half of what turns, where pairs are that far apart.
__device__ inline int half_chunks(const HeadScores& head) {
    return head.interleaved || !head.table ? 0 : head.n_rot / 16;
}

/// Number t of what a lane's keys are turned by in step i: a cosine and a signed sine for each of two columns
/// of chunk a, then of b, as the table has them but for what it is scaled by.
__device__ inline float key_turn(const HeadScores& head, int i, int lane, int t) {
    const Chunks chunks(half_chunks(head), i);
    const int column = 8 * (t < 4 ? chunks.a : chunks.b) + lane % 4 * 2 + t % 2;
    const bool sine = t % 4 >= 2;
    if (!head.table || column >= head.n_rot) return sine ? 0 : 1;
    const int pair = head.interleaved ? column / 2 : column % (head.n_rot / 2);
    const bool first = head.interleaved ? column % 2 == 0 : column < head.n_rot / 2;
    const float* const row = head.table + min(int64_t{lane / 4}, head.table_rows - 1) * head.n_rot + 2 * pair;
    const float scale = 1 / head.table[2 * pair];
    return sine ? (first ? -row[1] : row[1]) * scale : row[0] * scale;
}

/// [step][lane] of them, four words. Exactly: in f32 those that differ in more than sign, cosines and sines
/// of both columns where pairs are halves apart, else of both chunks; otherwise all eight as pairs of f16.
template <class Operand>
__device__ void prepare_turns(const Absorbed& x, int thread, int threads) {
    auto* const to = reinterpret_cast<uint4*>(shared_memory() + x.at.key_turns);
    for (int i = thread; i < x.head.dim / 16 * 32; i += threads) {
        const auto turn = [&](int t) { return key_turn(x.head, i / 32, i % 32, t); };
        const auto number = [&](int t) { return __float_as_uint(turn(t) * key_unit<Operand>); };
        if (!turns_exactly<Operand>(x))
            to[i] = {pair_f16(turn(0), turn(1)), pair_f16(turn(2), turn(3)), pair_f16(turn(4), turn(5)),
                     pair_f16(turn(6), turn(7))};
        else if (x.head.interleaved)
            to[i] = {number(0), number(4), number(3), number(7)};
        else
            to[i] = {number(0), number(1), number(6), number(7)};
    }
}

/// Queries turned back by the positions 8 o of a tile, columns in the order of steps; `turns`: rows of the
/// rope table, one for each o.
__device__ inline void turn_queries(const Absorbed& x, const float* turns, int heads, const Crew& crew) {
    const HeadScores& head = x.head;
    const float* const q = reinterpret_cast<const float*>(shared_memory() + x.at.q);
    const int q_row = head.dim + kPad / 2, half = half_chunks(head), turned = head.table ? head.n_rot : 0;
    auto* const to = reinterpret_cast<uint16_t*>(shared_memory() + x.at.turned_q);
    for (int i = crew.warp; i < 4 * heads; i += crew.warps) {
        const float *const from = q + i / 4 * head.dim, *const turn = turns + i % 4 * head.n_rot;
        uint16_t* const high = to + (i / 4 * 8 + i % 4 * 2) * q_row;
        const auto put = [&](int c, float a, float b) {
            const uint32_t both = pair_f16(a, b);
            *reinterpret_cast<uint32_t*>(high + c) = both;
            *reinterpret_cast<uint32_t*>(high + q_row + c) = pair_f16(
                a - from_f16(static_cast<uint16_t>(both)), b - from_f16(static_cast<uint16_t>(both >> 16)));
        };
        for (int unit = crew.lane; unit < head.dim / 4; unit += 32) {  // two pairs
            const bool apart = unit < 4 * half;
            const int c = apart ? 2 * unit : 8 * half + 4 * (unit - 2 * half),
                      d = apart ? c + 8 * half : c + 2;
            const float2 a = *reinterpret_cast<const float2*>(from + c),
                         b = *reinterpret_cast<const float2*>(from + d);
            const float4 t = apart        ? *reinterpret_cast<const float4*>(turn + 2 * c)
                             : c < turned ? *reinterpret_cast<const float4*>(turn + c)
                                          : float4{1, 0, 1, 0};
            const int chunk = c / 8;
            if (apart) {
                put(16 * chunk + c % 8, t.x * a.x + t.y * b.x, t.z * a.y + t.w * b.y);
                put(16 * chunk + 8 + c % 8, t.x * b.x - t.y * a.x, t.z * b.y - t.w * a.y);
            } else {
                put(c, t.x * a.x + t.y * a.y, t.x * a.y - t.y * a.x);
                put(d, t.z * b.x + t.w * b.y, t.z * b.y - t.w * b.x);
            }
        }
    }
}

/// kPinned: with what keys are turned by in registers.
template <class Operand, bool kPinned>
struct HeadScorer {
    static constexpr int kWords = 4;
    static constexpr float kUnit = key_unit<Operand>;

    const Absorbed& x;
    const int lane, half;
    uint32_t turn[kPinned ? kSteps : 1][kWords];

    __device__ HeadScorer(const Absorbed& x, int lane) : x(x), lane(lane), half(half_chunks(x.head)) {
#pragma unroll
        for (int i = 0; i < kSteps; ++i)
            if (kPinned && 16 * i < x.head.dim) read_turns(i, turn[i]);
    }
    __device__ void read_turns(int i, uint32_t (&to)[kWords]) const {
        const uint4 four = reinterpret_cast<const uint4*>(shared_memory() + x.at.key_turns)[32 * i + lane];
        to[0] = four.x;
        to[1] = four.y;
        to[2] = four.z;
        to[3] = four.w;
    }

    /// Keys, as they are stored, scaled, biased and turned: two rows' two columns of chunk a, the same of
    /// chunk b.
    template <Turning kTurning>
    __device__ void turn_half(uint32_t (&a)[4], const uint32_t (&turns)[kWords], const uint32_t* affine,
                              int step) const {
        if (affine) {
            const Chunks chunks(half, step);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const uint32_t* const of = affine + 4 * (j < 2 ? chunks.a : chunks.b);
                a[j] = multiply_add_pair(a[j], of[0], of[x.rows.slice / 2]);
            }
        }
        if (kTurning == Turning::none || (kTurning == Turning::halves && step >= half)) return;
        uint32_t other[4] = {a[2], a[3], a[0], a[1]};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (kTurning == Turning::neighbours) other[j] = a[j] << 16 | a[j] >> 16;
            const int t = j / 2 * 2;
            a[j] = multiply_add_pair(other[j], turns[t + 1], multiply_add_pair(a[j], turns[t], 0));
        }
    }
    template <Turning kTurning>
    __device__ void turn_exactly(uint32_t (&a)[4], const uint32_t (&turns)[kWords], const uint32_t* affine,
                                 int step) const {
        float key[4][2];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            key[j][0] = Operand::number(a[j]);
            key[j][1] = Operand::number(a[j] >> 16);
        }
        if (affine) {
            const Chunks chunks(half, step);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const uint32_t* const of = affine + 4 * (j < 2 ? chunks.a : chunks.b);
                const uint32_t scale = of[0], bias = of[x.rows.slice / 2];
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    key[j][i] = key[j][i] * from_f16(static_cast<uint16_t>(scale >> 16 * i)) +
                                from_f16(static_cast<uint16_t>(bias >> 16 * i));
            }
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float turned[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                constexpr bool kApart = kTurning == Turning::halves;
                const int t = kApart ? i : j / 2;
                const bool first = kApart ? j < 2 : i == 0;
                const float other = kApart ? key[j ^ 2][i] : key[j][1 - i],
                            sine = __uint_as_float(turns[2 + t]);
                turned[i] = key[j][i] * (kTurning == Turning::none ? kUnit : __uint_as_float(turns[t]));
                if (kTurning != Turning::none) turned[i] += other * (first ? -sine : sine);
            }
            a[j] = pair_f16(turned[0], turned[1]);
        }
    }

    template <Turning kTurning>
    __device__ void score_as(const unsigned char* tile, int head_in_slice, int rows_half,
                             float* scores) const {
        const HeadScores& head = x.head;
        const unsigned char* const shared = shared_memory();
        const int column = head_in_slice / head.group * head.dim;
        const uint32_t* const affine =
            head.row_scale || head.bias
                ? reinterpret_cast<const uint32_t*>(shared + x.at.affine) + column / 2 + lane % 4
                : nullptr;
        const unsigned char* const row =
            tile + x.rows.tile + (16 * rows_half + lane % 16) * x.rows.stride + 2 * column;
        const unsigned char* const apart = row + (lane < 16 ? 0 : 16 * half);
        const unsigned char* const together = row + (lane < 16 ? 0 : 16);
        const unsigned char* const q =
            shared + x.at.turned_q + (8 * head_in_slice + lane % 8) * (2 * head.dim + kPad) + lane / 8 * 16;
        const bool exact = turns_exactly<Operand>(x);
        float sum[4] = {};
        uint32_t b[4];
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            if (16 * i >= head.dim) break;
            if (i % 2 == 0) load_matrices(b, q + 32 * i);
            uint32_t a[4], turns[kWords];
            load_matrices(a, kTurning == Turning::halves && i < half ? apart + 16 * i : together + 32 * i);
            if (!kPinned) read_turns(i, turns);
#pragma unroll
            for (int j = 0; kPinned && j < kWords; ++j) turns[j] = turn[kPinned ? i : 0][j];
            if (exact)
                turn_exactly<kTurning>(a, turns, affine, i);
            else
                turn_half<kTurning>(a, turns, affine, i);
            multiply_add_f16(sum, a, b[i % 2 * 2], b[i % 2 * 2 + 1]);
        }
        const int octet = lane % 4;  // of the columns that this lane has sums of
        if (octet == 2 * rows_half) scores[16 * rows_half + lane / 4] = sum[0] + sum[1];
        if (octet == 2 * rows_half + 1) scores[16 * rows_half + 8 + lane / 4] = sum[2] + sum[3];
    }

    /// The 16 rows [16 rows_half, + 16) with one query head: scores[32], still without factors.
    __device__ void score(const unsigned char* tile, int head_in_slice, int rows_half, float* scores) const {
        if (!x.head.table)
            score_as<Turning::none>(tile, head_in_slice, rows_half, scores);
        else if (x.head.interleaved)
            score_as<Turning::neighbours>(tile, head_in_slice, rows_half, scores);
        else
            score_as<Turning::halves>(tile, head_in_slice, rows_half, scores);
    }
};

}  // namespace slimrt::cuda
