// Scores of a tile by heads, for the heads of a block's slice.
//
// RoPE on read, in two steps: the row at position 8 o + g is rotated by rows 8 o and g of the RoPE table, q .
// R(8 o + g) k = (R(8 o)^T q) . (R(g) k). The factors of keys never change, since lane 4 g + m of an mma has
// the tokens g and g + 8. Queries are rotated for the four o of a tile and become the eight columns of an
// mma, each as two f16 that add up to it. A warp does that by itself, in registers.
#pragma once

#include "kernels/cuda/absorbed_scores.cuh"

namespace slimrt::cuda {

/// Keys are multiplied as f16. Those of bf16 are scaled into its range, for which queries make up.
template <class Operand>
constexpr float key_unit = Operand::kBf16 ? 1.0f / 64 : 1.0f;

enum class Rotation { none, neox, interleaved };  // pairs (i, i + n_rot / 2), (2 i, 2 i + 1)

/// The chunks of 8 columns that step i multiplies: with NeoX pairs they are partners in rotation.
struct Chunks {
    int a, b;
    __device__ Chunks(int half, int i) : a(i < half ? i : 2 * i), b(i < half ? i + half : 2 * i + 1) {}
};

/// Chunks in half of the rotated columns, with NeoX pairs; else 0.
__device__ inline int half_chunks(const HeadScores& head) {
    return head.interleaved || !head.table ? 0 : head.n_rot / 16;
}

/// Factor t of a lane's keys in step i: cosine and signed sine for each of two columns of chunk a, then of
/// chunk b, as in the RoPE table but without its magnitude.
__device__ inline float key_rotation(const HeadScores& head, int i, int lane, int t) {
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

/// Stores [step][lane] of these factors, four words each. In f32 only those that differ in more than sign:
/// with NeoX pairs cosines and sines of both columns, else of both chunks. Codes, which are f16 by now, are
/// rotated in f16, by all eight factors as pairs of f16.
template <class Operand>
__device__ void prepare_key_rotations(const Absorbed& x, int thread, int threads) {
    auto* const to = reinterpret_cast<uint4*>(shared_memory() + x.at.key_rotations);
    for (int i = thread; i < x.head.dim / 16 * 32; i += threads) {
        const auto factor = [&](int t) { return key_rotation(x.head, i / 32, i % 32, t); };
        const auto number = [&](int t) { return __float_as_uint(factor(t) * key_unit<Operand>); };
        if (Operand::kConverted)
            to[i] = {pair_f16(factor(0), factor(1)), pair_f16(factor(2), factor(3)),
                     pair_f16(factor(4), factor(5)), pair_f16(factor(6), factor(7))};
        else if (x.head.interleaved)
            to[i] = {number(0), number(4), number(3), number(7)};
        else
            to[i] = {number(0), number(1), number(6), number(7)};
    }
}

template <class Operand, bool kPanels>
struct HeadScorer {
    static constexpr int kWords = 4;
    static constexpr float kUnit = key_unit<Operand>;

    const Absorbed& x;
    const int lane;

    __device__ const HeadScores& head() const { return x.head; }

    __device__ HeadScorer(const Absorbed& x, int lane) : x(x), lane(lane) {}
    __device__ void read_key_rotation(int i, uint32_t (&to)[kWords]) const {
        const uint4 four =
            reinterpret_cast<const uint4*>(shared_memory() + x.at.key_rotations)[32 * i + lane];
        to[0] = four.x;
        to[1] = four.y;
        to[2] = four.z;
        to[3] = four.w;
    }

    /// Applies scale, bias and RoPE to keys as they are stored: two rows' two columns of chunk a, then of
    /// chunk b. Here in f16, below in f32.
    template <Rotation kRotation, bool kAffine>
    __device__ void rotate_f16(uint32_t (&a)[4], const uint32_t (&rotation)[kWords],
                               const uint32_t* const (&affine)[2]) const {
        if constexpr (kAffine) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const uint32_t* const of = affine[j / 2];
                a[j] = multiply_add_pair(a[j], of[0], of[x.rows.slice / 2]);
            }
        }
        if (kRotation == Rotation::none) return;
        uint32_t other[4] = {a[2], a[3], a[0], a[1]};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (kRotation == Rotation::interleaved) other[j] = a[j] << 16 | a[j] >> 16;
            const int t = j / 2 * 2;
            a[j] = multiply_add_pair(other[j], rotation[t + 1], multiply_add_pair(a[j], rotation[t], 0));
        }
    }
    template <Rotation kRotation, bool kAffine>
    __device__ void rotate_f32(uint32_t (&a)[4], const uint32_t (&rotation)[kWords],
                               const uint32_t* const (&affine)[2]) const {
        float key[4][2];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            key[j][0] = Operand::number(a[j]);
            key[j][1] = Operand::number(a[j] >> 16);
        }
        if constexpr (kAffine) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const uint32_t* const of = affine[j / 2];
                const uint32_t scale = of[0], bias = of[x.rows.slice / 2];
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    key[j][i] = key[j][i] * from_f16(static_cast<uint16_t>(scale >> 16 * i)) +
                                from_f16(static_cast<uint16_t>(bias >> 16 * i));
            }
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float rotated[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                constexpr bool kApart = kRotation == Rotation::neox;
                const int t = kApart ? i : j / 2;
                const bool first = kApart ? j < 2 : i == 0;
                const float other = kApart ? key[j ^ 2][i] : key[j][1 - i],
                            sine = __uint_as_float(rotation[2 + t]);
                rotated[i] = key[j][i] * (kRotation == Rotation::none ? kUnit : __uint_as_float(rotation[t]));
                if (kRotation != Rotation::none) rotated[i] += other * (first ? -sine : sine);
            }
            a[j] = pair_f16(rotated[0], rotated[1]);
        }
    }

    /// A step's two chunks of 8 columns: this lane's part of them in the tile, their queries, the RoPE
    /// table's rows R(8 o), and the channels' scales and biases.
    struct Step {
        const unsigned char* keys;
        const float *q[2], *rotation;
        const uint32_t* affine[2];
        int number, column;  // of the first chunk
    };

    /// The part of a query's two columns that this lane multiplies with: one of two f16 that add up to it.
    /// One f16 is enough where rows hold no more.
    __device__ uint32_t part_of(float2 x) const {
        constexpr bool kWhole = Operand::kBf16 || Operand::kConverted;
        const bool second = lane / 4 % 2;
        const uint32_t both = pair_f16(x.x, x.y);
        if (kWhole) return second ? 0 : both;
        const uint32_t rest = pair_f16(x.x - from_f16(static_cast<uint16_t>(both)),
                                       x.y - from_f16(static_cast<uint16_t>(both >> 16)));
        return second ? rest : both;
    }

    /// A step for both halves of a tile; kApart: its chunks are partners in rotation (NeoX pairs).
    template <Rotation kRotation, bool kAffine, bool kApart>
    __device__ void multiply(const Step& step, float (&sum)[2][4]) const {
        float2 a = *reinterpret_cast<const float2*>(step.q[0]),
               b = *reinterpret_cast<const float2*>(step.q[1]);
        if constexpr (kApart) {
            const float4 t = *reinterpret_cast<const float4*>(step.rotation);
            const float2 first = a;
            a = {t.x * a.x + t.y * b.x, t.z * a.y + t.w * b.y};
            b = {t.x * b.x - t.y * first.x, t.z * b.y - t.w * first.y};
        } else if constexpr (kRotation == Rotation::interleaved) {
            const auto rotate = [&](float2 x, const float* at) -> float2 {
                const float2 t = *reinterpret_cast<const float2*>(at);
                return {t.x * x.x + t.y * x.y, t.x * x.y - t.y * x.x};
            };
            if (step.column < head().n_rot) a = rotate(a, step.rotation);
            if (step.column + 8 < head().n_rot) b = rotate(b, step.rotation + 8);
        }
        const uint32_t q[2] = {part_of(a), part_of(b)};
        uint32_t rotation[kWords];
        read_key_rotation(step.number, rotation);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            uint32_t key[4];
            load_matrices(key, step.keys + 16 * r * x.rows.stride);
            constexpr Rotation kKeys = kRotation == Rotation::neox && !kApart ? Rotation::none : kRotation;
            if constexpr (Operand::kConverted)
                rotate_f16<kKeys, kAffine>(key, rotation, step.affine);
            else
                rotate_f32<kKeys, kAffine>(key, rotation, step.affine);
            multiply_add_f16(sum[r], key, q[0], q[1]);
        }
    }

    template <Rotation kRotation, bool kAffine>
    __device__ float score_as(const unsigned char* tile, const float* rope_rows, int column,
                              int head_in_slice) const {
        const unsigned char* const shared = shared_memory();
        const int own = lane % 4 * 2, steps = head().dim / 16, apart = half_chunks(head());
        const auto keys_at = [&](int eight) {
            return tile + x.rows.tile + x.rows.template eight_at<kPanels>(lane % 16, column / 8 + eight);
        };
        const float* const q =
            reinterpret_cast<const float*>(shared + x.at.q) + head_in_slice * head().dim + own;
        const float* const octet = rope_rows + lane / 8 * head().n_rot;
        const uint32_t* const affine =
            reinterpret_cast<const uint32_t*>(shared + x.at.affine) + column / 2 + lane % 4;
        float sum[2][4] = {};  // for 16 rows each
        if (kRotation == Rotation::neox) {
            const int second = lane < 16 ? 0 : apart;
#pragma unroll 4
            for (int i = 0; i < apart; ++i)
                multiply<kRotation, kAffine, true>({keys_at(i + second),
                                                    {q + 8 * i, q + 8 * (apart + i)},
                                                    octet + 2 * (8 * i + own),
                                                    {affine + 4 * i, affine + 4 * (apart + i)},
                                                    i,
                                                    8 * i},
                                                   sum);
        }
        const int second = lane < 16 ? 0 : 1;
#pragma unroll 4
        for (int i = apart; i < steps; ++i)
            multiply<kRotation, kAffine, false>({keys_at(2 * i + second),
                                                 {q + 16 * i, q + 16 * i + 8},
                                                 octet + 16 * i + own,
                                                 {affine + 8 * i, affine + 8 * i + 4},
                                                 i,
                                                 16 * i + own},
                                                sum);
        const int octets = lane % 4;  // whose sums this lane has: token 8 octets + lane / 4
        const float mine = octets < 2 ? (octets % 2 ? sum[0][2] + sum[0][3] : sum[0][0] + sum[0][1])
                                      : (octets % 2 ? sum[1][2] + sum[1][3] : sum[1][0] + sum[1][1]);
        return __shfl_sync(~0u, mine, lane % 8 * 4 + lane / 8);
    }

    /// The score of row `lane` of a tile for one query head, without factors. rotation: the RoPE table's rows
    /// of every eighth token; column: where the head's key begins in the slice.
    __device__ float score(const unsigned char* tile, const float* rotation, int column,
                           int head_in_slice) const {
        const auto as = [&]<Rotation kRotation>() {
            return head().row_scale || head().bias
                       ? score_as<kRotation, true>(tile, rotation, column, head_in_slice)
                       : score_as<kRotation, false>(tile, rotation, column, head_in_slice);
        };
        if (!head().table) return as.template operator()<Rotation::none>();
        if (head().interleaved) return as.template operator()<Rotation::interleaved>();
        return as.template operator()<Rotation::neox>();
    }
};

}  // namespace slimrt::cuda
