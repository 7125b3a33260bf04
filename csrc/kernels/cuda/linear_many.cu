// Products of many tokens with 16-bit and quantised weights: tiles of tokens by rows of the weight
// (linear_tile.cuh). Stages of x, and of 16-bit weights, are copied asynchronously one or two stages ahead;
// quantised weights are unpacked a stage ahead (linear_unpack.cuh). There is one barrier a stage.
//
// x is rounded to f16 (bf16 for BF16 weights) once (linear_round.cu); beside F32 weights x is split, as these
// are (linear_float.cu). Where a scale is so large that f16 might not hold a weight, the block starts over
// with all weights times 2^-13. Where there are too few tiles for the device, k is divided among several
// blocks (split-K), whose sums a last kernel adds in order.
#include <algorithm>

#include "kernels/cuda/linear_unpack.cuh"

namespace slimrt::cuda {

namespace {

constexpr int kShift = 13;                   // Q6_K: 65504 * 128 * 32 * 2^-13 is below 65504; MXFP4: 2^29 is
constexpr int kSplits = 16, kMinPart = 512;  // of k

/// F32 weights in two f16 parts.
struct SplitWeight : F16Weight {};
template <class W>
constexpr bool kSplit = std::is_same_v<W, SplitWeight>;

/// Layout of a block's shared memory, in bytes: a TileHead, places of the tile's tokens (Share), what is
/// unpacked, stages of tokens (and, if nothing is unpacked, of rows). Two blocks fit on a multiprocessor with
/// 164 KB, of small tiles with 100 KB, and one everywhere.
template <class W, class S>
struct Layout {
    static constexpr bool kCoded = W::kScales > 0;
    static constexpr int kPlacesAt = divide_up(sizeof(TileHead), kPiece) * kPiece,
                         kUnpackAt = kPlacesAt + 4 * S::kTokens;
    static constexpr int kStagesAt = kUnpackAt + [] {
        if constexpr (kCoded) return UnpackLayout<W, S>::kBytes;
        return 0;
    }();
    static constexpr int kStage = S::kTokenBytes + (kCoded ? 0 : S::kWeightBytes);
    static constexpr int kRoom = S::kRows > 64 ? 81 << 10 : 49 << 10;
    static constexpr int kStages = kStagesAt + 3 * kStage <= kRoom ? 3 : 2;
    static constexpr int kBytes = kStagesAt + kStages * kStage;
    static_assert(kBytes <= 99 << 10, "the least that a device has");
};

__device__ int sibling_of(const Job& job) { return int(blockIdx.x) % job.group; }

/// The grid: siblings and tiles of tokens first, so that blocks that read the same weights run together;
/// tiles of rows; parts of k.
template <class W, class S>
__device__ Share share_of(const Job& job) {
    const int chunks = divide_up(job.k, W::kChunk), splits = gridDim.z, split = blockIdx.z;
    const int token = int(blockIdx.x) / job.group * S::kTokens;
    Share share{tile_at(job, blockIdx.y, S::kRows), token, min(token + S::kTokens, job.tokens),
                int(int64_t(chunks) * split / splits), int(int64_t(chunks) * (split + 1) / splits)};
    if (job.order) {
        share.token = job.places[blockIdx.x].first;
        share.end = job.places[blockIdx.x].end;
        if (share.token < share.end) share.tile.head = job.order[share.token];
    }
    return share;
}

/// Sums of a share, with weights times `factor`.
template <class W, class S>
__device__ void multiply_share(const Job& job, const Rounded& x, TileHead& head, size_t row_bytes,
                               float factor, WarpTile<S>& warp) {
    using L = Layout<W, S>;
    using Weights = std::conditional_t<L::kCoded, Unpacker<W, S>, CopiesOfRows<S>>;
    constexpr int kSubs = W::kChunk / S::kDepth;
    unsigned char* const shared = shared_memory();
    const int first = head.share.first * kSubs;
    const int last = min(head.share.last * kSubs, divide_up(job.k, S::kDepth));
    CopiesOfTokens<S> tokens(x, reinterpret_cast<const int*>(shared + L::kPlacesAt), first);
    Weights weights = [&] {
        if constexpr (L::kCoded)
            return Weights(job, head, row_bytes, factor, shared + L::kUnpackAt);
        else
            return Weights(job, head.share.tile, row_bytes, first);
    }();
    const auto stage_at = [&](int stage) { return shared + L::kStagesAt + stage * L::kStage; };
    const auto copy = [&](int step, int stage) {
        if (step < last) {
            tokens.copy(stage_at(stage));
            if constexpr (!L::kCoded) weights.copy(stage_at(stage) + S::kTokenBytes);
        }
        commit_copies();
    };
    if constexpr (L::kCoded) weights.stage(head.share.first);
#pragma unroll
    for (int i = 0; i + 1 < L::kStages; ++i) copy(first + i, i);
    if constexpr (L::kCoded)
        if (first < last) weights.unpack(first);
    int stage = 0;
    for (int step = first; step < last; ++step) {
        wait_copies<L::kStages - 2>();
        __syncthreads();
        if constexpr (L::kCoded)
            if (step + 1 < last) weights.unpack(step + 1);
        copy(step + L::kStages - 1, stage ? stage - 1 : L::kStages - 1);
        const unsigned char* const x_now = stage_at(stage);
        if constexpr (L::kCoded)
            warp.template multiply<W::kBf16>(x_now, weights.at(step));
        else if constexpr (kSplit<W>)
            warp.multiply_split(x_now, x_now + S::kTokenBytes);
        else
            warp.template multiply<W::kBf16>(x_now, x_now + S::kTokenBytes);
        stage = stage + 1 < L::kStages ? stage + 1 : 0;
    }
    wait_copies<0>();
    __syncthreads();
}

/// Column of `partial` [split, token, all columns of all parts] where a tile's head begins.
__device__ int column_of(const Job& job, const Tile& tile) {
    int column = columns_at(job, tile.head, sibling_of(job)) * job.parts[tile.part].rows;
    for (int p = 0; p < tile.part; ++p) column += job.all_heads() * job.parts[p].rows;
    return column;
}

/// Writes a share's sums, times `back` and the inverse of their tokens (and of split rows), to out or to
/// `partial`.
template <class W, class S>
__device__ void finish(const Job& job, const Rounded& x, const Share& share, const int* places, float back,
                       float* partial, int columns, const WarpTile<S>& warp) {
    const Part& part = job.parts[share.tile.part];
    const int row = share.tile.row + warp.row + warp.lane % 4 * 2, left = part.rows - row;
    const bool biased = !partial && part.bias, ordered = job.order;
    float bias[2 * warp.kB][2], inverse[2 * warp.kB][2];
#pragma unroll
    for (int i = 0; i < 4 * warp.kB; ++i) {
        const int r = i / 2 * 8 + i % 2;
        bias[i / 2][i % 2] = biased && r < left ? bias_at(job, share.tile, row + r) : 0.0f;
        inverse[i / 2][i % 2] = kSplit<W> && r < left ? inverse_at(job, share.tile, row + r) : 1.0f;
    }
    // Token t's results are `step` after those of t - 1; with an order (and one head) the order says where.
    float* const out = reinterpret_cast<float*>(part.out) + row;
    const size_t step = partial ? columns : part.out_stride / sizeof(float);
    float* const first =
        partial ? partial + (size_t(blockIdx.z) * job.tokens + share.token) * step +
                      column_of(job, share.tile) + row
                : out + share.token * step + columns_at(job, share.tile.head, sibling_of(job)) * part.rows;
#pragma unroll
    for (int i = 0; i < 2 * warp.kA; ++i) {
        const int t = warp.token + warp.lane / 4 + 8 * i;
        if (share.token + t >= share.end) continue;
        const float factor = x.inverse[places[t]] * back;
        float* const to = ordered ? out + size_t(job.order[share.token + t]) * part.rows : first + t * step;
#pragma unroll
        for (int j = 0; j < 4 * warp.kB; ++j) {
            const int r = j / 2 * 8 + j % 2;
            if (r < left)
                to[r] = fmaf(warp.sums[i / 2][j / 2][i % 2 * 2 + j % 2] * inverse[j / 2][j % 2], factor,
                             bias[j / 2][j % 2]);
        }
    }
}

template <class W, class S>
__global__ void __launch_bounds__(kTileThreads, 2)
    many_kernel(const __grid_constant__ Job job, const __grid_constant__ Rounded x, size_t row_bytes,
                float* partial, int columns, const int* only_if) {
    if (only_if && !*only_if) return;
    TileHead& head = *reinterpret_cast<TileHead*>(shared_memory());
    int* const places = reinterpret_cast<int*>(shared_memory() + Layout<W, S>::kPlacesAt);
    const Share share = share_of<W, S>(job);
    if (share.token >= share.end) return;
    if (threadIdx.x == 0) head = {share, 0};
    if (threadIdx.x < S::kTokens)
        places[threadIdx.x] = share.place(job, sibling_of(job), share.token + int(threadIdx.x));
    __syncthreads();
    WarpTile<S> warp;
    float factor = 1;
    while (true) {
        warp.clear();
        multiply_share<W>(job, x, head, row_bytes, factor, warp);
        if (W::kScales == 0 || factor != 1 || !head.too_large) break;
        factor = power_of_2(-kShift);
    }
    finish<W>(job, x, head.share, places, 1 / factor, partial, columns, warp);
}

/// out = the sum over splits + bias; a thread a number.
__global__ void add_splits(Job job, const float* partial, int columns, int splits, const int* only_if) {
    if (only_if && !*only_if) return;
    const int heads = job.all_heads();
    int column = blockIdx.x * blockDim.x + threadIdx.x, p = 0;
    const int token = blockIdx.y;
    if (column >= columns) return;
    float sum = 0;
    for (int s = 0; s < splits; ++s) sum += partial[(size_t(s) * job.tokens + token) * columns + column];
    while (column >= heads * job.parts[p].rows) column -= heads * job.parts[p++].rows;
    const Part& part = job.parts[p];
    reinterpret_cast<float*>(part.out + token * part.out_stride)[column] =
        sum + bias_at(job, {p, column / part.rows / job.group, 0}, column % part.rows);
}

int columns_of(const Job& job) {
    int columns = 0;
    for (int p = 0; p < job.n_parts; ++p) columns += job.all_heads() * job.parts[p].rows;
    return columns;
}

int tokens_of_tile(int tokens) { return tokens <= 32 ? 32 : tokens <= 64 ? 64 : 128; }

/// fn(TileShape()) for tiles of so many tokens.
template <class Fn>
void with_tile(int tokens, const Fn& fn) {
    if (tokens == 32) return fn(TileShape<32, 64>());
    if (tokens == 64) return fn(TileShape<64, 64>());
    fn(TileShape<128, 128>());
}

int rows_of_tile(int tokens) {
    int rows = 0;
    with_tile(tokens, [&](auto tile) { rows = tile.kRows; });
    return rows;
}

template <class W>
void start_tiles(const Device& device, const Job& job, const Rounded& x, float* partial, const int* only_if) {
    const Tiling tiling = tiling_of(device, job);
    const int columns = columns_of(job);
    with_tile(tiling.tokens, [&](auto tile) {
        using S = decltype(tile);
        const Shape shape{.grid = dim3(divide_up(job.tokens, S::kTokens) * job.group, tiles_of(job, S::kRows),
                                       tiling.splits),
                          .block = dim3(kTileThreads),
                          .shared_bytes = Layout<W, S>::kBytes};
        launch(device, many_kernel<W, S>, shape, job, x, W::row_bytes(job.k),
               tiling.splits > 1 ? partial : nullptr, columns, only_if);
    });
    if (tiling.splits == 1) return;
    const Shape adding{.grid = dim3(divide_up(columns, kTileThreads), job.tokens),
                       .block = dim3(kTileThreads)};
    launch(device, add_splits, adding, job, partial, columns, tiling.splits, only_if);
}

}  // namespace

/// Large tiles read shared memory half as often; small ones are faster where large ones, even with k divided,
/// would leave half of the multiprocessors idle. Split numbers, of which as many bytes are more products,
/// have small ones only where no division of k is enough. A part of k has at least kMinPart.
Tiling tiling_of(const Device& device, const Job& job) {
    const int processors = std::max(device.processors, 1);
    Tiling t{.tokens = tokens_of_tile(job.tokens)};
    const auto tiles = [&] {
        t.rows = rows_of_tile(t.tokens);
        return tiles_of(job, t.rows) * divide_up(job.tokens, t.tokens) * job.group;
    };
    const int most = std::clamp(job.k / kMinPart, 1, kSplits);
    if (t.tokens == 128 && 2 * tiles() * (job.split ? most : 1) < processors) t.tokens = 64;
    t.splits = std::clamp(2 * processors / std::max(tiles(), 1), 1, most);
    return t;
}

size_t split_bytes(const Device& device, const Job& job) {
    size_t most = 0;
    constexpr int kAtOnce = 32;  // numbers of tokens between multiples of this have the same tiling
    for (Job some = job; some.tokens > 0; some.tokens = (some.tokens - 1) / kAtOnce * kAtOnce) {
        const int splits = tiling_of(device, some).splits;
        if (splits > 1) most = std::max(most, size_t(4) * splits * some.tokens * columns_of(job));
    }
    return most;
}

void many_tokens(const Device& device, DType dtype, const Job& job, const Rounded& x, float* partial,
                 const int* only_if) {
    with_weight(dtype, [&](auto w) { start_tiles<decltype(w)>(device, job, x, partial, only_if); });
}

void many_floats(const Device& device, const Job& job, const Rounded& x, float* partial) {
    start_tiles<SplitWeight>(device, job, x, partial, nullptr);
}

int ordered_tile(int pairs, int n_experts) { return tokens_of_tile(pairs / n_experts); }

void many_ordered(const Device& device, DType dtype, const Job& job, const Rounded& x, int tile,
                  int n_tiles) {
    with_weight(dtype, [&](auto w) {
        with_tile(tile, [&](auto tile_shape) {
            using W = decltype(w);
            using S = decltype(tile_shape);
            const Shape shape{.grid = dim3(n_tiles, tiles_of(job, S::kRows), 1),
                              .block = dim3(kTileThreads),
                              .shared_bytes = Layout<W, S>::kBytes};
            launch(device, many_kernel<W, S>, shape, job, x, W::row_bytes(job.k),
                   static_cast<float*>(nullptr), 0, static_cast<const int*>(nullptr));
        });
    });
}

}  // namespace slimrt::cuda
