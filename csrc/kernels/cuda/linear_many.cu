// Products of many tokens with 16-bit and quantised weights: tiles of 32 or 128 tokens by 64 rows of the
// weight, multiplied by mma with f32 sums.
//
// x is rounded to f16 (bf16 for BF16 weights) once (linear_round.cu). A tile then goes along k in steps
// of 64: x arrives by copies in the background, a step ahead; the weight's bytes a chunk (128 or 256 of k)
// ahead, and before each step its part of them is unpacked to f16: scale * code - minimum in f32, rounded
// once. Where a scale is so large that f16 might not hold a weight, the block starts over with all weights
// times 2^-13. Where tiles are too few for the device, k is dealt out to several blocks, whose sums a last
// kernel adds in order.
#include <algorithm>

#include "kernels/cuda/linear_weights.cuh"

namespace slimrt::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kRows = 64;                // of the weight
constexpr int kSpace = kStep + 8;        // halves between rows of a step: reads of eight rows meet all banks
constexpr int kFewer = 32, kMore = 128;  // tokens of a tile
constexpr int kShift = 13;               // Q6_K: 65504 * 128 * 32 * 2^-13 is below 65504; MXFP4: 2^29 is
constexpr int kSplits = 16, kMinPart = 512;  // of k

/// Scratch of one block, in bytes from the beginning of its shared memory.
template <class W, int kTokens>
struct Layout {
    static constexpr int kXBytes = kTokens * kSpace * 2, kStaged = kRows * kRowSpace<W>;
    static constexpr int kWeightAt = 2 * kXBytes;
    static constexpr int kStagedAt = kWeightAt + kRows * kSpace * 2;
    static constexpr int kScaleAt = kStagedAt + 2 * kStaged;
    static constexpr int kFlagAt = kScaleAt + 4 * W::kScales * (1 + W::kMins) * kRows;
    static constexpr int kPlacesAt = kFlagAt + 16;  // of the tile's tokens, see Share::place()
    static constexpr int kBytes = kPlacesAt + 4 * kTokens;
};

/// What a block multiplies: a tile's rows by tokens [token, end), along chunks [first, last) of k.
struct Share {
    Tile tile;
    int token, end, first, last;

    /// Of a token's row of x, as it was rounded.
    __device__ int place(const Job& job, int index) const {
        return job.order ? job.order[index] / job.share : index * job.heads + tile.head;
    }
};

/// Blocks of the grid are tiles of tokens, so that those that read the same weights run together, tiles of
/// rows, and parts of k.
template <class W>
__device__ Share share_of(const Job& job, int tokens) {
    const int chunks = divide_up(job.k, W::kChunk), splits = gridDim.z, split = blockIdx.z;
    const int token = int(blockIdx.x) * tokens;
    Share share{tile_at(job, blockIdx.y, kRows), token, min(token + tokens, job.tokens),
                int(int64_t(chunks) * split / splits), int(int64_t(chunks) * (split + 1) / splits)};
    if (job.order) {
        share.token = job.places[blockIdx.x].first;
        share.end = job.places[blockIdx.x].end;
        if (share.token < share.end) share.tile.head = job.order[share.token];
    }
    return share;
}

/// The rows of x that a tile reads, -1 where there are none: once, since `share` divides.
template <int kTokens>
__device__ void find_places(int* places, const Job& job, const Share& share) {
    const int i = threadIdx.x, token = share.token + i;
    if (i < kTokens) places[i] = token < share.end ? share.place(job, token) : -1;
}

template <int kTokens>
__device__ void stage_x(unsigned char* to, const Rounded& x, const int* places, int step) {
    constexpr int kPerRow = kStep * 2 / kPiece;
    const int first = threadIdx.x / kPerRow, piece = threadIdx.x % kPerRow;
    const uint16_t* const from = x.x + step * kStep + piece * kPiece / 2;
    to += first * kSpace * 2 + piece * kPiece;
#pragma unroll
    for (int row = 0; row < kTokens; row += kThreads / kPerRow) {
        const int place = places[first + row];
        copy16(to + row * kSpace * 2, from + size_t(max(place, 0)) * x.stride, place >= 0);
    }
}

/// The scales, and minima, of a staged chunk, times `factor`; raises the flag if a weight could exceed f16.
template <class W>
__device__ void unpack_scales(float* to, const unsigned char* staged, const Job& job, const Tile& tile,
                              size_t offset, float factor, int* flag) {
    const int row = threadIdx.x;
    if (row >= min(kRows, job.parts[tile.part].rows - tile.row)) return;
    constexpr float kLargestF16 = 65504;
    const unsigned char* const from = staged_row<W>(staged, job, tile, row, offset);
    float scale[W::kScales], largest = 0;
    W::scales(from, scale);
#pragma unroll
    for (int i = 0; i < W::kScales; ++i) {
        largest = fmaxf(largest, fabsf(scale[i]) * W::kLargest);
        to[i * kRows + row] = scale[i] * factor;
    }
    if constexpr (W::kMins) {
        uint32_t codes[W::kScales / 2];
        const float each = W::minima(from, codes) * factor;
        float most = W::kLargestMinimum;
#pragma unroll
        for (int i = 0; i < W::kScales; ++i) {
            const float code = from_f16(uint16_t(codes[i / 2] >> i % 2 * 16));
            if (W::kLargestMinimum == 0) most = fmaxf(most, fabsf(code));
            to[(W::kScales + i) * kRows + row] = each * code;
        }
        largest += fabsf(each) * most;
    }
    if (largest > kLargestF16) atomicExch(flag, 1);  // as others may
}

/// Step `sub` of a staged chunk as f16, 16 weights a thread.
template <class W>
__device__ void unpack_step(uint16_t* to, const unsigned char* staged, const float* scales, const Job& job,
                            const Tile& tile, size_t offset, int sub) {
    constexpr int kParts = kStep / 16;
    const int row = threadIdx.x / kParts, part = threadIdx.x % kParts;
    const int group = sub * 2 + part / 2, s = part % 2;
    const unsigned char* const from = staged_row<W>(staged, job, tile, row, offset);
    uint32_t words[8];
#pragma unroll
    for (int m = 0; m < 4; ++m) {
        const uint2 c = W::codes(from, group, s, m);
        if constexpr (W::kScales == 0) {
            words[2 * m] = c.x;
            words[2 * m + 1] = c.y;
        } else {
            const int of = W::kScales * 16 == W::kChunk ? 2 * group + s : group;
            const float scale = scales[of * kRows + row];
            const float minimum = W::kMins ? scales[(W::kScales + of) * kRows + row] : 0.0f;
            const auto weight = [&](uint32_t code) { return scale * from_f16(uint16_t(code)) - minimum; };
            words[2 * m] = pair_f16(weight(c.x & 0xffff), weight(c.y & 0xffff));
            words[2 * m + 1] = pair_f16(weight(c.x >> 16), weight(c.y >> 16));
        }
    }
    uint4* const out = reinterpret_cast<uint4*>(to + row * kSpace + 16 * part);
    out[0] = {words[0], words[1], words[2], words[3]};
    out[1] = {words[4], words[5], words[6], words[7]};
}

/// A warp's part of a tile: kA times 16 tokens by 16 kB rows of the weight, whose places are `token` and
/// `row`.
template <int kTokens>
struct WarpTile {
    static constexpr int kWide = kTokens == kMore ? 4 : 2;  // warps along tokens
    static constexpr int kA = kTokens / kWide / 16, kB = kRows / (kThreads / kWarp / kWide) / 16;
    float sums[kA][2 * kB][4];
    int token, row, lane;

    __device__ WarpTile() {
        const int warp = threadIdx.x / kWarp;
        lane = threadIdx.x % kWarp;
        token = warp % kWide * kA * 16;
        row = warp / kWide * kB * 16;
    }
    __device__ void clear() {
        for (auto& a : sums)
            for (auto& b : a)
                for (float& x : b) x = 0;
    }

    template <bool brain>
    __device__ void multiply(const uint16_t* x, const uint16_t* w) {
        const int eight = lane / 8, in_eight = lane % 8;
#pragma unroll
        for (int k = 0; k < kStep; k += 16) {
            uint32_t a[kA][4], b[kB][4];
#pragma unroll
            for (int i = 0; i < kA; ++i)
                load_matrices(a[i],
                              x + (token + 16 * i + eight % 2 * 8 + in_eight) * kSpace + k + eight / 2 * 8);
#pragma unroll
            for (int j = 0; j < kB; ++j)
                load_matrices(b[j],
                              w + (row + 16 * j + eight / 2 * 8 + in_eight) * kSpace + k + eight % 2 * 8);
#pragma unroll
            for (int i = 0; i < kA; ++i) {
#pragma unroll
                for (int j = 0; j < 2 * kB; ++j) {
                    const uint32_t b0 = b[j / 2][j % 2 * 2], b1 = b[j / 2][j % 2 * 2 + 1];
                    if constexpr (brain)
                        multiply_add_bf16(sums[i][j], a[i], b0, b1);
                    else
                        multiply_add_f16(sums[i][j], a[i], b0, b1);
                }
            }
        }
    }

    /// put(token, row, sum) for each sum.
    template <class Put>
    __device__ void each(Put&& put) const {
#pragma unroll
        for (int i = 0; i < kA; ++i) {
#pragma unroll
            for (int j = 0; j < 2 * kB; ++j) {
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    put(token + 16 * i + lane / 4 + e / 2 * 8, row + 8 * j + lane % 4 * 2 + e % 2,
                        sums[i][j][e]);
            }
        }
    }
};

/// Sums of a share with weights times `factor`.
template <class W, int kTokens>
__device__ void multiply_share(const Job& job, const Rounded& x, const Share& share, size_t row_bytes,
                               float factor, WarpTile<kTokens>& warp) {
    using L = Layout<W, kTokens>;
    unsigned char* const shared = shared_memory();
    uint16_t* const weights = reinterpret_cast<uint16_t*>(shared + L::kWeightAt);
    float* const scales = reinterpret_cast<float*>(shared + L::kScaleAt);
    const int* const places = reinterpret_cast<int*>(shared + L::kPlacesAt);
    const auto x_at = [&](int step) { return shared + step % 2 * L::kXBytes; };
    const auto staged_at = [&](int chunk) { return shared + L::kStagedAt + chunk % 2 * L::kStaged; };
    const auto stage_chunk = [&](int chunk) {
        stage_rows<W>(staged_at(chunk), job, share.tile, kRows, size_t(chunk) * W::kChunkBytes, row_bytes,
                      threadIdx.x, kThreads);
    };
    constexpr int kSubs = W::kChunk / kStep;
    const int last = min(share.last * kSubs, divide_up(job.k, kStep));  // step
    if (share.first < share.last) {
        stage_chunk(share.first);
        stage_x<kTokens>(x_at(share.first * kSubs), x, places, share.first * kSubs);
        commit_copies();
    }
    for (int step = share.first * kSubs; step < last; ++step) {
        const int chunk = step / kSubs, sub = step % kSubs;
        const size_t offset = size_t(chunk) * W::kChunkBytes;
        wait_copies<0>();
        __syncthreads();
        if (sub == 0) {
            if constexpr (W::kScales > 0) {
                unpack_scales<W>(scales, staged_at(chunk), job, share.tile, offset, factor,
                                 reinterpret_cast<int*>(shared + L::kFlagAt));
                __syncthreads();
            }
            if (chunk + 1 < share.last) stage_chunk(chunk + 1);
        }
        if (step + 1 < last) stage_x<kTokens>(x_at(step + 1), x, places, step + 1);
        commit_copies();
        unpack_step<W>(weights, staged_at(chunk), scales, job, share.tile, offset, sub);
        __syncthreads();
        warp.template multiply<W::kBrain>(reinterpret_cast<const uint16_t*>(x_at(step)), weights);
    }
    wait_copies<0>();
    __syncthreads();
}

/// Column of `partial` [split, token, all columns of all parts] where a tile's head begins.
__device__ int column_of(const Job& job, int index) {
    int column = 0;
    for (int p = 0; p < job.n_parts; ++p) {
        const int in_head = divide_up(job.parts[p].rows, kRows), tiles = job.heads * in_head;
        if (index < tiles) return column + index / in_head * job.parts[p].rows + index % in_head * kRows;
        index -= tiles;
        column += job.heads * job.parts[p].rows;
    }
    return column;
}

template <class W, int kTokens>
__global__ void __launch_bounds__(kThreads, 2)
    many_kernel(Job job, Rounded x, size_t row_bytes, float* partial, int columns) {
    using L = Layout<W, kTokens>;
    const Share share = share_of<W>(job, kTokens);
    if (share.token >= share.end) return;
    int* const flag = reinterpret_cast<int*>(shared_memory() + L::kFlagAt);
    if (threadIdx.x == 0) *flag = 0;
    find_places<kTokens>(reinterpret_cast<int*>(shared_memory() + L::kPlacesAt), job, share);
    __syncthreads();
    WarpTile<kTokens> warp;
    float factor = 1;
    while (true) {
        warp.clear();
        multiply_share<W>(job, x, share, row_bytes, factor, warp);
        if (W::kScales == 0 || factor != 1 || !*flag) break;
        factor = power_of_2(-kShift);
    }
    const int first = column_of(job, blockIdx.y);
    warp.each([&](int t, int r, float sum) {
        const int token = share.token + t, row = share.tile.row + r;
        if (token >= share.end || row >= job.parts[share.tile.part].rows) return;
        const float value = sum / factor * x.inverse[share.place(job, token)];
        if (job.order) {
            const Tile pair{share.tile.part, job.order[token], row};
            out_at(job, pair, 0, row) = value + bias_at(job, pair, row);
        } else if (partial)
            partial[(size_t(blockIdx.z) * job.tokens + token) * columns + first + r] = value;
        else
            out_at(job, share.tile, token, row) = value + bias_at(job, share.tile, row);
    });
}

/// out = the sum over splits + bias; a thread a number.
__global__ void add_splits(Job job, const float* partial, int columns, int splits) {
    int column = blockIdx.x * blockDim.x + threadIdx.x, p = 0;
    const int token = blockIdx.y;
    if (column >= columns) return;
    float sum = 0;
    for (int s = 0; s < splits; ++s) sum += partial[(size_t(s) * job.tokens + token) * columns + column];
    while (column >= job.heads * job.parts[p].rows) column -= job.heads * job.parts[p++].rows;
    const Part& part = job.parts[p];
    reinterpret_cast<float*>(part.out + token * part.out_stride)[column] =
        sum + (part.bias ? part.bias[column] : 0.0f);
}

int tokens_of_tile(int tokens) { return tokens <= 2 * kFewer ? kFewer : kMore; }

/// Among how many blocks k is dealt out: a share is not under kMinPart.
int splits_of(const Device& device, const Job& job, int tiles) {
    const int wanted = 2 * std::max(device.processors, 1) / std::max(tiles, 1);
    return std::clamp(std::min(wanted, job.k / kMinPart), 1, kSplits);
}

int columns_of(const Job& job) {
    int columns = 0;
    for (int p = 0; p < job.n_parts; ++p) columns += job.heads * job.parts[p].rows;
    return columns;
}

template <class W, int kTokens>
void start(const Device& device, const Job& job, const Rounded& x, float* partial) {
    const int tiles = tiles_of(job, kRows), token_tiles = divide_up(job.tokens, kTokens);
    const int splits = splits_of(device, job, tiles * token_tiles), columns = columns_of(job);
    const Shape shape{.grid = dim3(token_tiles, tiles, splits),
                      .block = dim3(kThreads),
                      .shared_bytes = Layout<W, kTokens>::kBytes};
    launch(device, many_kernel<W, kTokens>, shape, job, x, W::row_bytes(job.k),
           splits > 1 ? partial : nullptr, columns);
    if (splits == 1) return;
    const Shape adding{.grid = dim3(divide_up(columns, kThreads), job.tokens), .block = dim3(kThreads)};
    launch(device, add_splits, adding, job, partial, columns, splits);
}

template <class W>
void start(const Device& device, const Job& job, const Rounded& x, float* partial) {
    if (tokens_of_tile(job.tokens) == kFewer) return start<W, kFewer>(device, job, x, partial);
    start<W, kMore>(device, job, x, partial);
}

}  // namespace

size_t split_bytes(const Device& device, const Job& job) {
    size_t most = 0;
    for (int first = 0; first < job.tokens; first += kFewer) {
        const int tokens = std::min(first + kFewer, job.tokens);
        const int tiles = tiles_of(job, kRows) * divide_up(tokens, tokens_of_tile(tokens));
        const int splits = splits_of(device, job, tiles);
        if (splits > 1) most = std::max(most, size_t(4) * splits * tokens * columns_of(job));
    }
    return most;
}

void many_tokens(const Device& device, DType dtype, const Job& job, const Rounded& x, float* partial) {
    with_weight(dtype, [&](auto w) { start<decltype(w)>(device, job, x, partial); });
}

int ordered_tile(int pairs, int n_experts) { return tokens_of_tile(pairs / n_experts); }

void many_ordered(const Device& device, DType dtype, const Job& job, const Rounded& x, int tile,
                  int n_tiles) {
    with_weight(dtype, [&](auto w) {
        using W = decltype(w);
        const auto start_tiles = [&](auto kernel, size_t shared_bytes) {
            const Shape shape{.grid = dim3(n_tiles, tiles_of(job, kRows), 1),
                              .block = dim3(kThreads),
                              .shared_bytes = shared_bytes};
            launch(device, kernel, shape, job, x, W::row_bytes(job.k), static_cast<float*>(nullptr), 0);
        };
        if (tile == kFewer)
            start_tiles(many_kernel<W, kFewer>, Layout<W, kFewer>::kBytes);
        else
            start_tiles(many_kernel<W, kMore>, Layout<W, kMore>::kBytes);
    });
}

}  // namespace slimrt::cuda
