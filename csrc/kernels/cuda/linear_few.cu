// Products of up to eight tokens: as fast as the weights' bytes arrive, and nearly as exact as float32.
//
// A block takes 16 rows of the weight (32 where many are quantised) and its eight chains of sums take turns
// at the chunks of k, each alone, a warp's or, where shared memory has no room for eight, two of a warp's: it
// copies the bytes of its chunk to shared memory, meanwhile splits x in a high and a low 16-bit part (f16: 22
// bits of a float, after a power of two per token and chunk; bf16: 16 bits), and multiplies rows by tokens
// with mma, whose cost does not depend on how many of the eight columns are tokens. Codes are exact in f16;
// scales multiply the f32 sums of their groups. In the end the chains are added in order. A warp does not
// copy ahead: the 24 warps of a multiprocessor have enough on the way among them (24 KB on each of 132
// multiprocessors hold 4.3 TB/s up).
//
// The order of a sum depends on k and the weight's type alone, so a token's result does not depend on the
// other tokens or products. Of a gate and what it gates a block takes the same rows of both, half as many of
// each, and multiplies them in the end. What is added to rows that are then normed is so by the last block.
#include <algorithm>

#include "kernels/cuda/activations.cuh"
#include "kernels/cuda/linear_weights.cuh"
#include "kernels/cuda/norm.cuh"

namespace slimrt::cuda {

namespace {

constexpr int kChains = 8;
constexpr int kTop = 9;  // exponent that the largest magnitude gets: sums of 32 fit f16 then

/// Bytes: high parts, low parts, sums of groups; 32 or 96 more than a multiple of 128, so that reads of eight
/// tokens meet all banks.
template <class W>
constexpr int kTokenSpace = 4 * W::kChunk + (W::kMins && W::kScales > 8 ? 96 : 32);

/// The rows of the weight that a block takes; of a gate, part 0, and what it gates, part 1, half of each.
template <class W, int kRows, bool kGated>
struct BlockRows {
    static constexpr int kEach = kGated ? kRows / 2 : kRows;
    Tile tile;

    __device__ BlockRows(const Job& job, int block)
        : tile(kGated ? Tile{0, 0, block * kEach} : tile_at(job, block, kRows)) {}
    __device__ Tile gated() const { return {1, 0, tile.row}; }

    __device__ void stage(unsigned char* to, const Job& job, size_t offset, size_t row_bytes,
                          int lane) const {
        stage_rows<W>(to, job, tile, kEach, offset, row_bytes, lane, kWarp);
        if constexpr (kGated)
            stage_rows<W>(to + kEach * kRowSpace<W>, job, gated(), kEach, offset, row_bytes, lane, kWarp);
    }
    __device__ const unsigned char* staged(const unsigned char* from, const Job& job, int i,
                                           size_t offset) const {
        if (kGated && i >= kEach)
            return staged_row<W>(from + kEach * kRowSpace<W>, job, gated(), i - kEach, offset);
        return staged_row<W>(from, job, tile, i, offset);
    }
};

/// A warp's shared memory, in bytes from its beginning.
template <class W, int kTiles>
struct Layout {
    static constexpr int kRows = 16 * kTiles;
    static constexpr int kScaleAt = kRows * kRowSpace<W>;                // [kScales, kRows]
    static constexpr int kMinimaAt = kScaleAt + 4 * W::kScales * kRows;  // [kRows, kScales f16]
    static constexpr int kFactorAt = kMinimaAt + (W::kMins ? 2 * W::kScales * kRows : 0);
    static constexpr int kInverseAt = kFactorAt + (W::kMins ? 4 * kRows : 0);
    static constexpr int kTokensAt = kInverseAt + 4 * kFewTokens;
    __host__ __device__ static constexpr int bytes(int tokens) { return kTokensAt + tokens * kTokenSpace<W>; }
};

/// Adds both numbers up over each `lanes` lanes; the sum of a is in their lower half, that of b in the upper.
template <int lanes>
__device__ float sum_of_lanes(float a, float b, int lane) {
    const bool upper = lane & lanes / 2;
    float sum = (upper ? b : a) + __shfl_xor_sync(0xffffffff, upper ? a : b, lanes / 2);
#pragma unroll
    for (int bits = lanes / 4; bits; bits /= 2) sum += __shfl_xor_sync(0xffffffff, sum, bits);
    return sum;
}

/// Four numbers as two words in the order in which codes come.
template <class W>
__device__ uint2 pack(const float (&v)[4]) {
    if constexpr (W::kBrain)
        return {pair_bf16(v[0], v[1]), pair_bf16(v[2], v[3])};
    else if constexpr (W::kScales == 0)
        return {pair_f16(v[0], v[1]), pair_f16(v[2], v[3])};
    else
        return {pair_f16(v[0], v[2]), pair_f16(v[1], v[3])};
}
template <class W>
__device__ float unpack(uint2 words, int i) {
    if constexpr (W::kScales == 0) {
        const uint16_t bits = uint16_t((i / 2 ? words.y : words.x) >> i % 2 * 16);
        return W::kBrain ? from_bf16(bits) : from_f16(bits);
    } else {
        return from_f16(uint16_t((i % 2 ? words.y : words.x) >> i / 2 * 16));
    }
}

/// Writes k elements of a token as two parts, zeros beyond, and for minima the sums of their groups, in two
/// parts too. Returns the inverse of the power of two they are multiplied by.
template <class W>
__device__ float split_floats(unsigned char* to, const float* from, int k, int lane) {
    constexpr int kEach = W::kChunk / (4 * kWarp);  // times four of the lane's
    float v[kEach][4];
    const int at = 4 * lane;
    if (k == W::kChunk && reinterpret_cast<uintptr_t>(from) % kPiece == 0) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const float4 four = reinterpret_cast<const float4*>(from)[lane + i * kWarp];
            v[i][0] = four.x, v[i][1] = four.y, v[i][2] = four.z, v[i][3] = four.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4 * kEach; ++i) {
            const int index = at + i / 4 * 4 * kWarp + i % 4;
            v[i / 4][i % 4] = index < k ? from[index] : 0.0f;
        }
    }
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < 4 * kEach; ++i) largest = max(largest, __float_as_uint(v[i / 4][i % 4]) & 0x7fffffff);
    largest = largest_in_warp(largest);
    const bool finite = largest < 0x7f800000;  // else no low parts: infinity less itself
    const int shift = min(kTop - exponent_of(largest), 126);
    const float factor = power_of_2(shift);
    uint2* const words = reinterpret_cast<uint2*>(to) + lane;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        for (float& x : v[i]) x *= factor;
        const uint2 high = pack<W>(v[i]);
        float low[4];
        for (int j = 0; j < 4; ++j) low[j] = finite ? v[i][j] - unpack<W>(high, j) : 0.0f;
        words[i * kWarp] = high;
        words[W::kChunk / 4 + i * kWarp] = pack<W>(low);
    }
    if constexpr (W::kMins) {
        const auto four = [&](int i) { return (v[i][0] + v[i][1]) + (v[i][2] + v[i][3]); };
        constexpr int kLanes = W::kChunk / W::kScales / 4, kHalf = kLanes / 2;  // of a group
        const float sum = sum_of_lanes<kLanes>(four(0), four(1), lane);
        uint16_t* const out = reinterpret_cast<uint16_t*>(to + 4 * W::kChunk) +
                              lane / kHalf % 2 * W::kScales / 2 + lane / kLanes;
        const uint16_t high = to_f16(sum);
        if (lane % kHalf == 0) {
            out[0] = high;
            out[W::kScales] = to_f16(finite ? sum - from_f16(high) : 0.0f);
        }
    }
    return power_of_2(-shift);
}

/// The scales and minima of a staged row.
template <class W, int kTiles>
__device__ void unpack_scales(unsigned char* own, const unsigned char* row, int index) {
    using L = Layout<W, kTiles>;
    float scale[W::kScales];
    W::scales(row, scale);
#pragma unroll
    for (int i = 0; i < W::kScales; ++i)
        reinterpret_cast<float*>(own + L::kScaleAt)[i * L::kRows + index] = scale[i];
    if constexpr (W::kMins) {
        constexpr int kWords = W::kScales / 2;
        uint32_t codes[kWords];
        reinterpret_cast<float*>(own + L::kFactorAt)[index] = W::minima(row, codes);
        uint4* const out = reinterpret_cast<uint4*>(own + L::kMinimaAt) + index * kWords / 4;
#pragma unroll
        for (int i = 0; i < kWords; i += 4) out[i / 4] = {codes[i], codes[i + 1], codes[i + 2], codes[i + 3]};
    }
}

template <class W>
__device__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint2 b) {
    if constexpr (W::kBrain)
        multiply_add_bf16(d, a, b.x, b.y);
    else
        multiply_add_f16(d, a, b.x, b.y);
}

/// What one lane has of a warp's tiles: rows group, group + 8 (+ 16 ...) by tokens 2 * member, + 1.
template <int kTiles>
using Sums = float[kTiles][4];

/// A chunk of rows times its tokens, without the tokens' powers of two.
template <class W, int kTiles>
struct Chunk {
    using L = Layout<W, kTiles>;
    const unsigned char* rows[2 * kTiles];  // group, group + 8, group + 16, ...
    const unsigned char* own;               // the warp's memory
    const unsigned char* token;             // of the lane's column; beyond the last the last once more
    int group, member;

    /// Elements `at` ... of a token's high parts.
    __device__ uint2 part_of_x(int at) const { return *reinterpret_cast<const uint2*>(token + 2 * at); }

    /// sums += factors * d, of rows group and group + 8 of a tile.
    __device__ void fold(float (&sums)[4], const float (&d)[4], const float* factors, int tile) const {
        const float upper = factors[16 * tile + group], lower = factors[16 * tile + group + 8];
        sums[0] = fmaf(upper, d[0], sums[0]);
        sums[1] = fmaf(upper, d[1], sums[1]);
        sums[2] = fmaf(lower, d[2], sums[2]);
        sums[3] = fmaf(lower, d[3], sums[3]);
    }
    __device__ const float* scales(int i) const {
        return reinterpret_cast<const float*>(own + L::kScaleAt) + i * L::kRows;
    }

    /// The minima's share: codes of groups times the sums of x, of eight groups high parts and low parts side
    /// by side, of sixteen one after the other.
    __device__ void fold_minima(Sums<kTiles>& sums) const {
        constexpr int kWords = W::kScales / 2, kNext = kWords - 4;
        const uint32_t* const codes = reinterpret_cast<const uint32_t*>(own + L::kMinimaAt) + member;
        const float* const factors = reinterpret_cast<const float*>(own + L::kFactorAt);
        const uint32_t* const x = reinterpret_cast<const uint32_t*>(token + 4 * W::kChunk) + member;
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
            const uint32_t* const upper = codes + (16 * t + group) * kWords;
            const uint32_t* const lower = upper + 8 * kWords;
            const uint32_t a[4] = {upper[0], lower[0], upper[kNext], lower[kNext]};
            float d[4];
            multiply_f16(d, a, x[0], x[4]);
            if constexpr (kNext > 0) multiply_add_f16(d, a, x[kWords], x[kWords + 4]);
            for (float& sum : d) sum = -sum;
            fold(sums[t], d, factors, t);
        }
    }

    __device__ void multiply(Sums<kTiles>& sums, int groups) const {
        constexpr bool kHalves = W::kScales * 16 == W::kChunk;  // a scale for each 16 elements
#pragma unroll 2
        for (int g = 0; g < groups; ++g) {
            uint2 high[2], low[2];
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                const int at = g * kGroup + 16 * s + 4 * member;
                high[s] = part_of_x(at);
                low[s] = part_of_x(W::kChunk + at);
            }
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
                float d[4];
#pragma unroll
                for (int s = 0; s < 2; ++s) {
                    const uint2 u = W::codes(rows[2 * t], g, s, member);
                    const uint2 l = W::codes(rows[2 * t + 1], g, s, member);
                    const uint32_t a[4] = {u.x, l.x, u.y, l.y};
                    float(&to)[4] = W::kScales ? d : sums[t];
                    if (W::kScales > 0 && (kHalves || s == 0))
                        multiply_f16(to, a, high[s].x, high[s].y);
                    else
                        multiply_add<W>(to, a, high[s]);
                    multiply_add<W>(to, a, low[s]);
                    if constexpr (kHalves) fold(sums[t], d, scales(2 * g + s), t);
                }
                if constexpr (W::kScales && !kHalves) fold(sums[t], d, scales(g), t);
            }
        }
        if constexpr (W::kMins) fold_minima(sums);
    }
};

/// After as the kernel sees it.
struct Ending {
    Activation gate{};
    NormView norm;
    Matrix sum;
    unsigned* tickets;  // none: nothing is normed

    explicit Ending(const After& after)
        : gate(after.gate ? *after.gate : Activation{}),
          norm(after.norm ? *after.norm : slimrt::cuda::Norm{}),
          sum(after.sum),
          tickets(after.tickets) {}
};

/// The last block that comes here knows that all others have written, and norms.
__device__ void norm_last(const Job& job, const Ending& ending) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicInc(ending.tickets, gridDim.x - 1) == gridDim.x - 1;  // which leaves 0
        __threadfence();
    }
    __syncthreads();
    if (!last) return;
    for (int token = 0; token < job.tokens; ++token)
        norm_row<kPack>(ending.norm, ending.sum, job.parts[0].rows, token);
}

/// Adds the chains in order, and the bias, and writes out.
template <class W, int kTiles, int kWarps, bool kGated>
__device__ void finish(const Job& job, const BlockRows<W, 16 * kTiles, kGated>& rows,
                       const Sums<kTiles> (&sums)[kChains / kWarps], const Ending& ending) {
    constexpr int kRows = 16 * kTiles, kEach = BlockRows<W, kRows, kGated>::kEach;
    const int warp = threadIdx.x / kWarp, group = threadIdx.x % kWarp / 4, member = threadIdx.x % 4;
    float* const all = reinterpret_cast<float*>(shared_memory());  // [chain, token, row]
    __syncthreads();
#pragma unroll
    for (int c = 0; c < kChains / kWarps; ++c) {
        for (int i = 0; i < 4 * kTiles; ++i) {
            const int token = 2 * member + i % 2, row = i / 4 * 16 + group + i % 4 / 2 * 8;
            all[((warp + c * kWarps) * kFewTokens + token) * kRows + row] = sums[c][i / 4][i % 4];
        }
    }
    __syncthreads();
    const auto result = [&](const Tile& tile, int token, int i, int row) {
        float sum = 0;
        for (int c = 0; c < kChains; ++c) sum += all[(c * kFewTokens + token) * kRows + i];
        return sum + bias_at(job, tile, row);
    };
    for (int i = threadIdx.x; i < job.tokens * kEach; i += kWarps * kWarp) {
        const int token = i / kEach, at = i % kEach, row = rows.tile.row + at;
        if (row >= job.parts[rows.tile.part].rows) continue;
        float& out = out_at(job, rows.tile, token, row);
        if constexpr (kGated) {
            const float up = result(rows.gated(), token, kEach + at, row);
            out_at(job, rows.gated(), token, row) = up;
            out = activated(ending.gate, result(rows.tile, token, at, row)) * gated(ending.gate, up);
        } else {
            out = result(rows.tile, token, at, row);
            if (ending.tickets) ending.sum.row(token)[row] += out;
        }
    }
    if (!kGated && ending.tickets) norm_last(job, ending);
}

/// One chain's sums: chunks chain, chain + kChains ...
template <class W, int kTiles, class Rows>
__device__ void add_chain(const Job& job, const Rows& rows, size_t row_bytes, int chain, unsigned char* own,
                          Sums<kTiles>& sums) {
    using L = Layout<W, kTiles>;
    const int lane = threadIdx.x % kWarp, group = lane / 4, member = lane % 4;
    float* const inverse = reinterpret_cast<float*>(own + L::kInverseAt);
    for (int first = chain * W::kChunk; first < job.k; first += kChains * W::kChunk) {
        const size_t offset = size_t(first / W::kChunk) * W::kChunkBytes;
        const int k = min(job.k - first, W::kChunk);
        rows.stage(own, job, offset, row_bytes, lane);
        commit_copies();
        for (int t = 0; t < job.tokens; ++t) {
            const float back = split_floats<W>(own + L::kTokensAt + t * kTokenSpace<W>,
                                               x_row(job, rows.tile.head, t) + first, k, lane);
            if (lane == 0) inverse[t] = back;
        }
        wait_copies<0>();
        __syncwarp();
        if constexpr (W::kScales > 0) {
            if (lane < L::kRows) unpack_scales<W, kTiles>(own, rows.staged(own, job, lane, offset), lane);
            __syncwarp();
        }
        const int token = min(group, job.tokens - 1);
        Chunk<W, kTiles> chunk{{}, own, own + L::kTokensAt + token * kTokenSpace<W>, group, member};
#pragma unroll
        for (int i = 0; i < 2 * kTiles; ++i) chunk.rows[i] = rows.staged(own, job, group + 8 * i, offset);
        Sums<kTiles> of_chunk{};
        chunk.multiply(of_chunk, divide_up(k, kGroup));
        const float back[2] = {inverse[min(2 * member, job.tokens - 1)],
                               inverse[min(2 * member + 1, job.tokens - 1)]};
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
            for (int i = 0; i < 4; ++i) sums[t][i] = fmaf(of_chunk[t][i], back[i % 2], sums[t][i]);
        }
        __syncwarp();
    }
}

template <class W, int kTiles, int kWarps, bool kGated>
__global__ void __launch_bounds__(kWarps* kWarp, 3 * kChains / kWarps)
    few_kernel(const __grid_constant__ Job job, size_t row_bytes, const __grid_constant__ Ending ending) {
    using L = Layout<W, kTiles>;
    const int warp = threadIdx.x / kWarp;
    const BlockRows<W, L::kRows, kGated> rows(job, blockIdx.x);
    unsigned char* const own = shared_memory() + warp * L::bytes(job.tokens);
    Sums<kTiles> sums[kChains / kWarps]{};
#pragma unroll
    for (int c = 0; c < kChains / kWarps; ++c)
        add_chain<W, kTiles>(job, rows, row_bytes, warp + c * kWarps, own, sums[c]);
    finish<W, kTiles, kWarps>(job, rows, sums, ending);
}

/// Whether it was started: where shared memory has room for all tokens, and a block all threads of a norm.
template <class W, int kTiles, int kWarps>
bool start(const Device& device, const Job& job, const After& after) {
    using L = Layout<W, kTiles>;
    constexpr size_t kFinish = size_t(4) * kChains * kFewTokens * L::kRows;
    const size_t bytes = std::max(kFinish, size_t(kWarps) * L::bytes(job.tokens));
    if (bytes > device.shared_bytes || (after.norm && kWarps * kWarp < kThreads)) return false;
    const int tiles = after.gate ? divide_up(job.parts[0].rows, L::kRows / 2) : tiles_of(job, L::kRows);
    launch(device, after.gate ? &few_kernel<W, kTiles, kWarps, true> : &few_kernel<W, kTiles, kWarps, false>,
           {.grid = dim3(tiles), .block = dim3(kWarps * kWarp), .shared_bytes = bytes}, job,
           W::row_bytes(job.k), Ending(after));
    return true;
}

/// Two tiles a warp where there are enough rows for all multiprocessors, and room.
template <class W>
bool start_coded(const Device& device, const Job& job, const After& after) {
    static_assert(4 * Layout<W, 1>::bytes(kFewTokens) <= 99 << 10, "the least that a device has");
    const bool many = tiles_of(job, 32) >= 2 * device.processors;
    return (many && start<W, 2, 8>(device, job, after)) || start<W, 1, 8>(device, job, after) ||
           start<W, 1, 4>(device, job, after);
}

}  // namespace

bool few_tokens(const Device& device, DType dtype, const Job& job, const After& after) {
    bool started = false;
    with_weight(dtype, [&](auto w) {
        using W = decltype(w);
        if constexpr (W::kScales > 0)
            started = start_coded<W>(device, job, after);
        else
            started = start<W, 1, 8>(device, job, after);
    });
    return started;
}

}  // namespace slimrt::cuda
