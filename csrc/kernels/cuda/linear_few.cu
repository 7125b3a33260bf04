// Products of up to eight tokens: as fast as the weights' bytes arrive, and nearly as exact as float32.
//
// A block takes 16 rows of the weight (32 where it is quantised) and its warps take turns at the chunks of k,
// each alone: it copies the bytes of its chunk and x's columns to shared memory, splits x in a high and a low
// 16-bit part (f16: 22 bits of a float, after a power of two per token and chunk; bf16: 16 bits), and
// multiplies rows by tokens with mma, whose cost does not depend on how many of the eight columns are tokens.
// Codes are exact in f16; scales multiply the f32 sums of their groups. In the end the warps' sums are added
// in order. Nothing is in flight but copies of other warps and blocks, of which a multiprocessor holds many:
// 24 KB outstanding are enough for 4.3 TB/s on 132 of them.
//
// The order of a sum depends on k and the weight's type alone, so a token's result does not depend on the
// other tokens or products.
#include <algorithm>

#include "kernels/cuda/linear_weights.cuh"

namespace slimrt::cuda {

namespace {

constexpr int kWarps = 8;
constexpr int kTop = 14;  // exponent that a row's largest magnitude gets

/// A warp's shared memory, in bytes from its beginning.
template <class W>
struct Layout {
    static constexpr int kRows = 16 * W::kTiles;
    static constexpr int kTokenSpace = 4 * W::kChunk + 32;  // high parts, low parts, sums of groups
    static constexpr int kScaleAt = kRows * kRowSpace<W>;
    static constexpr int kInverseAt = kScaleAt + 4 * W::kScales * kRows;
    static constexpr int kTokensAt = kInverseAt + 4 * kFewTokens;
    __host__ __device__ static constexpr int bytes(int tokens) { return kTokensAt + tokens * kTokenSpace; }
};

/// Starts the copy of k elements of x from `from`, which begins (address % 16) bytes after `to`.
__device__ void stage_floats(unsigned char* to, const float* from, int k, int space, int lane) {
    const unsigned char* const bytes = reinterpret_cast<const unsigned char*>(from);
    const int before = int(reinterpret_cast<uintptr_t>(bytes) % kPiece);
    for (int at = lane * kPiece; at < space; at += kWarp * kPiece) {
        const int wanted = max(0, min(before + 4 * k - at, kPiece));
        copy_part_of_16(to + at, bytes - before + (wanted ? at : 0), wanted);
    }
}

/// Adds each of eight numbers up over the warp; the sum of v[i] is in lanes 4 i to 4 i + 3.
__device__ float sum_eight(float (&v)[8], int lane) {
#pragma unroll
    for (int keep = 4; keep; keep /= 2) {
        const bool upper = lane & 4 * keep;
#pragma unroll
        for (int i = 0; i < keep; ++i) {
            const float other = __shfl_xor_sync(0xffffffff, upper ? v[i] : v[i + keep], 4 * keep);
            v[i] = (upper ? v[i + keep] : v[i]) + other;
        }
    }
    v[0] += __shfl_xor_sync(0xffffffff, v[0], 2);
    return v[0] + __shfl_xor_sync(0xffffffff, v[0], 1);
}

/// Turns a chunk of a token, floats that begin `before` bytes after `token`, into its two parts in place.
template <class W>
__device__ void split_floats(unsigned char* token, int before, float* inverse, int lane) {
    constexpr int kEach = W::kChunk / kWarp;
    float v[kEach];
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        v[i] = reinterpret_cast<const float*>(token + before)[i * kWarp + lane];
        largest = max(largest, __float_as_uint(v[i]) & 0x7fffffff);
    }
    const int shift = min(kTop - exponent_of(largest_in_warp(largest)), 126);  // all lanes have read
    const float factor = power_of_2(shift);
    uint16_t* const high = reinterpret_cast<uint16_t*>(token);
    // Where codes come as elements 0, 2, 1, 3, so does x.
    const int at = W::kScales ? (lane & ~3) | (lane & 1) << 1 | (lane >> 1 & 1) : lane;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        v[i] *= factor;
        const uint16_t upper = W::kBrain ? to_bf16(v[i]) : to_f16(v[i]);
        const float rest = v[i] - (W::kBrain ? from_bf16(upper) : from_f16(upper));
        const float lower = fabsf(v[i]) < power_of_2(kTop + 2) ? rest : 0.0f;  // of infinity: not NaN
        high[i * kWarp + at] = upper;
        high[W::kChunk + i * kWarp + at] = W::kBrain ? to_bf16(lower) : to_f16(lower);
    }
    if constexpr (W::kMins) {
        const float sum = sum_eight(v, lane);
        if (lane % 4 == 0) reinterpret_cast<float*>(token + 4 * W::kChunk)[lane / 4] = sum;
    }
    if (lane == 0) *inverse = power_of_2(-shift);
}

template <class W>
__device__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint2 b) {
    if constexpr (W::kBrain)
        multiply_add_bf16(d, a, b.x, b.y);
    else
        multiply_add_f16(d, a, b.x, b.y);
}

/// What one lane has of a warp's tiles: rows group, group + 8 (+ 16 ...) by tokens 2 * member, + 1.
template <class W>
using Sums = float[W::kTiles][4];

/// A chunk of rows times its tokens, without the tokens' powers of two.
template <class W>
struct Chunk {
    const unsigned char* rows[2 * W::kTiles];  // group, group + 8, group + 16, ...
    const float* scales;                       // [kScales, kRows]
    const unsigned char* tokens;
    int n_tokens, group, member;

    __device__ uint2 part_of_x(int at) const {
        using L = Layout<W>;
        if (group >= n_tokens) return {0, 0};
        return *reinterpret_cast<const uint2*>(tokens + group * L::kTokenSpace + 2 * at);
    }
    __device__ float scale(int i, int row) const { return scales[i * Layout<W>::kRows + row]; }

    /// sums += scale * d, of rows group and group + 8 of a tile.
    __device__ void fold(float (&sums)[4], const float (&d)[4], int i, int tile) const {
        const float upper = scale(i, 16 * tile + group), lower = scale(i, 16 * tile + group + 8);
        sums[0] = fmaf(upper, d[0], sums[0]);
        sums[1] = fmaf(upper, d[1], sums[1]);
        sums[2] = fmaf(lower, d[2], sums[2]);
        sums[3] = fmaf(lower, d[3], sums[3]);
    }

    /// The minima's share: minus minimum times the sum of x.
    __device__ void fold_minima(Sums<W>& sums, int g) const {
        using L = Layout<W>;
        float of_tokens[2];
        for (int i = 0; i < 2; ++i) {
            const int token = min(2 * member + i, n_tokens - 1);
            of_tokens[i] = reinterpret_cast<const float*>(tokens + token * L::kTokenSpace + 4 * W::kChunk)[g];
        }
#pragma unroll
        for (int t = 0; t < W::kTiles; ++t) {
            const float d[4] = {-of_tokens[0], -of_tokens[1], -of_tokens[0], -of_tokens[1]};
            fold(sums[t], d, W::kScales / 2 + g, t);
        }
    }

    __device__ void multiply(Sums<W>& sums, int groups) const {
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
            for (int t = 0; t < W::kTiles; ++t) {
                float d[4] = {};
#pragma unroll
                for (int s = 0; s < 2; ++s) {
                    const uint2 u = W::codes(rows[2 * t], g, s, member);
                    const uint2 l = W::codes(rows[2 * t + 1], g, s, member);
                    const uint32_t a[4] = {u.x, l.x, u.y, l.y};
                    if constexpr (W::kScales == 0) {
                        multiply_add<W>(sums[t], a, high[s]);
                        multiply_add<W>(sums[t], a, low[s]);
                    } else {
                        multiply_add<W>(d, a, high[s]);
                        multiply_add<W>(d, a, low[s]);
                        if constexpr (W::kScales == 16 && !W::kMins) {  // a scale for each 16
                            fold(sums[t], d, 2 * g + s, t);
                            for (float& x : d) x = 0;
                        }
                    }
                }
                if constexpr (W::kScales == 8 || W::kMins) fold(sums[t], d, g, t);
            }
            if constexpr (W::kMins) fold_minima(sums, g);
        }
    }
};

/// Adds the warps' sums in order, and the bias, and writes out.
template <class W>
__device__ void finish(const Job& job, const Tile& tile, const Sums<W>& sums, int warp, int group,
                       int member) {
    constexpr int kRows = Layout<W>::kRows;
    float* const all = reinterpret_cast<float*>(shared_memory());  // [warp, token, row]
    __syncthreads();
#pragma unroll
    for (int t = 0; t < W::kTiles; ++t) {
        for (int i = 0; i < 4; ++i) {
            const int token = 2 * member + i % 2, row = 16 * t + group + i / 2 * 8;
            all[(warp * kFewTokens + token) * kRows + row] = sums[t][i];
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < job.tokens * kRows; i += kWarps * kWarp) {
        const int row = tile.row + i % kRows;
        if (row >= tile.part.rows) continue;
        float sum = 0;
        for (int w = 0; w < kWarps; ++w) sum += all[w * kFewTokens * kRows + i];
        out_at(tile, i / kRows, row) = sum + bias_at(tile, row);
    }
}

template <class W>
__global__ void __launch_bounds__(kWarps* kWarp) few_kernel(Job job, size_t row_bytes) {
    using L = Layout<W>;
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, group = lane / 4, member = lane % 4;
    const Tile tile = tile_at(job, blockIdx.x, L::kRows);
    unsigned char* const own = shared_memory() + warp * L::bytes(job.tokens);
    unsigned char* const tokens = own + L::kTokensAt;
    float* const scales = reinterpret_cast<float*>(own + L::kScaleAt);
    float* const inverse = reinterpret_cast<float*>(own + L::kInverseAt);
    Sums<W> sums{};
    for (int first = warp * W::kChunk; first < job.k; first += kWarps * W::kChunk) {
        const size_t offset = size_t(first / W::kChunk) * W::kChunkBytes;
        const int k = min(job.k - first, W::kChunk);
        stage_rows<W>(own, tile, L::kRows, offset, row_bytes, lane, kWarp);
        for (int t = 0; t < job.tokens; ++t)
            stage_floats(tokens + t * L::kTokenSpace, x_row(job, tile.head, t) + first, k,
                         4 * W::kChunk + kPiece, lane);
        commit_copies();
        wait_copies<0>();
        __syncwarp();
        for (int t = 0; t < job.tokens; ++t) {
            const int before = int(reinterpret_cast<uintptr_t>(x_row(job, tile.head, t)) % kPiece);
            split_floats<W>(tokens + t * L::kTokenSpace, before, inverse + t, lane);
        }
        if constexpr (W::kScales > 0) {
            if (lane < L::kRows) {
                float scale[W::kScales];
                W::scales(staged_row<W>(own, tile, lane, offset), scale);
#pragma unroll
                for (int i = 0; i < W::kScales; ++i) scales[i * L::kRows + lane] = scale[i];
            }
        }
        __syncwarp();
        Chunk<W> chunk{{}, scales, tokens, job.tokens, group, member};
#pragma unroll
        for (int i = 0; i < 2 * W::kTiles; ++i)
            chunk.rows[i] = staged_row<W>(own, tile, group + 8 * i, offset);
        Sums<W> of_chunk{};
        chunk.multiply(of_chunk, divide_up(k, kGroup));
        const float back[2] = {inverse[min(2 * member, job.tokens - 1)],
                               inverse[min(2 * member + 1, job.tokens - 1)]};
#pragma unroll
        for (int t = 0; t < W::kTiles; ++t) {
            for (int i = 0; i < 4; ++i) sums[t][i] = fmaf(of_chunk[t][i], back[i % 2], sums[t][i]);
        }
        __syncwarp();
    }
    finish<W>(job, tile, sums, warp, group, member);
}

template <class W>
void start(const Device& device, const Job& job) {
    using L = Layout<W>;
    static constexpr size_t kFinish = size_t(4) * kWarps * kFewTokens * L::kRows;
    const auto bytes = [](int tokens) { return std::max(kFinish, size_t(kWarps) * L::bytes(tokens)); };
    int at_once = job.tokens;  // what shared memory has room for
    while (at_once > 1 && bytes(at_once) > device.shared_bytes) at_once = divide_up(at_once, 2);
    for (int first = 0; first < job.tokens; first += at_once) {
        Job now = job;
        now.tokens = std::min(at_once, job.tokens - first);
        now.x += first * job.x_stride;
        for (Part& part : now.parts) part.out += first * part.out_stride;
        const Shape shape{.grid = dim3(tiles_of(job, L::kRows)),
                          .block = dim3(kWarps * kWarp),
                          .shared_bytes = bytes(now.tokens)};
        launch(device, few_kernel<W>, shape, now, W::row_bytes(job.k));
    }
}

}  // namespace

void few_tokens(const Device& device, DType dtype, const Job& job) {
    switch (dtype) {
        case DType::F16:
            return start<PlainWeight>(device, job);
        case DType::BF16:
            return start<BrainWeight>(device, job);
        case DType::Q8_0:
            return start<Q8_0Weight>(device, job);
        case DType::Q4_0:
            return start<Q4_0Weight>(device, job);
        case DType::Q4_K:
            return start<Q4_KWeight>(device, job);
        default:
            return start<Q6_KWeight>(device, job);
    }
}

}  // namespace slimrt::cuda
