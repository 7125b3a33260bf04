// Products of up to eight tokens: as fast as the weights' bytes arrive, and nearly as exact as float32.
//
// As many blocks as run at once go through the rows of the weight, 16 at a time (32 for more than four
// tokens). The chunks of k are dealt in turn to eight chains of sums; a warp has one chain or, where shared
// memory has no room for eight warps, two. A warp multiplies a chunk while the next one's bytes are copied to
// shared memory; the first ones are copied before the previous kernel has ended. x is split into a high and a
// low 16-bit part (f16: 22 bits of a float, after a power of two per token and chunk; bf16: 16 bits), once
// for all rows where there is room. mma multiplies rows by both parts. Codes are exact in f16; scales
// multiply the f32 sums of their groups. In the end the chains are added in order.
//
// The order of a sum depends on k and the weight's type alone, so a token's result does not depend on other
// tokens or products. For a gate and its up-projection a block takes half as many rows of each, and
// multiplies their results. A norm of x is computed by each block for itself.
#include <algorithm>

#include "kernels/cuda/activations.cuh"
#include "kernels/cuda/linear_few_chunk.cuh"

namespace slimrt::cuda {

namespace {

constexpr int kChains = 8;
template <int kColumns>
constexpr int kAtOnce = kColumns == 1 ? 3 : 2;  // blocks of 8 warps an SM has registers for

/// Around, as the kernel sees it.
struct AroundView {
    Activation gate{};
    NormView norm;
    Matrix normed, sum;  // the norm's input, and what is added to, or none

    explicit AroundView(const Around& around)
        : gate(around.gate ? *around.gate : Activation{}),
          norm(around.norm ? NormView(*around.norm) : NormView()),
          normed(around.normed),
          sum(around.sum) {}
};

/// The chunks of a tile in a warp's order: those of its first chain, then those of its second.
template <int kWarps>
struct Turns {
    int warp, chunks;  // chunks: of k

    __device__ int of_chain(int c) const { return (chunks + kChains - 1 - (warp + c * kWarps)) / kChains; }
    __device__ int all() const {
        int sum = 0;
        for (int c = 0; c < kChains / kWarps; ++c) sum += of_chain(c);
        return sum;
    }
    __device__ int chunk(int turn) const {
        const int first = of_chain(0);
        return turn < first ? warp + turn * kChains : warp + kWarps + (turn - first) * kChains;
    }
};

/// Copies the rows of a warp's chunks, chunk after chunk and tile after tile, each to the next stage.
template <class W, class L, int kWarps, bool kGated>
struct Stager {
    const Job& job;
    size_t row_bytes;
    const Turns<kWarps>& turns;
    unsigned char* own;
    int n_tiles, stages, all;
    int tile = int(blockIdx.x), turn = 0, stage = 0;
    BlockRows<W, L::kRows, kGated> rows{job, tile};

    __device__ void next() {
        if (tile < n_tiles && all > 0) {
            rows.start(own + L::kStagesAt + stage * L::kStage, size_t(turns.chunk(turn)) * W::kChunkBytes,
                       row_bytes, threadIdx.x % kWarp);
            if (++stage == stages) stage = 0;
            if (++turn == all) {
                turn = 0, tile += gridDim.x;
                if (tile < n_tiles) rows = BlockRows<W, L::kRows, kGated>(job, tile);
            }
        }
        commit_copies();
    }
};

/// All threads: factors of the tokens' norms; the first block also writes the normed rows.
__device__ void find_norms(const Job& job, const AroundView& around, RowScale (&by)[kNormedTokens]) {
    for (int t = 0; t < job.tokens; ++t) {
        const float* const row = around.normed.row(t);
        const RowScale scale = row_scale<kPack>(around.norm, row, job.k);
        if (threadIdx.x == 0) by[t] = scale;
        for (int i = threadIdx.x * kPack; blockIdx.x == 0 && i < job.k; i += blockDim.x * kPack)
            store_pack(around.norm.out.row(t) + i,
                       normed<kPack>(around.norm, scale, load_pack<kPack>(row + i), i));
    }
    __syncthreads();
}

/// Splits chunks of a warp's tokens.
template <class W>
struct Splitter {
    const Job& job;
    const AroundView& around;
    const RowScale* by;
    int lane, sibling;

    __device__ void load(TokenChunk<W>& x, int head, int token, int chunk) const {
        const int first = chunk * W::kChunk, k = max(0, min(job.k - first, W::kChunk));
        const TokenRow row = around.normed.data ? TokenRow{around.normed.row(token), &around.norm, by[token]}
                                                : TokenRow{x_row(job, head, sibling, token), nullptr, {}};
        x.load(row, first, k, lane);
    }
    __device__ void one(unsigned char* to, int head, int chunk) const {
        for (int t = 0; t < job.tokens; ++t) {
            TokenChunk<W> x;
            load(x, head, t, chunk);
            x.split(to + t * TokenSpace<W>::kBytes, lane);
        }
    }
    /// All chunks, two of which are loaded at a time.
    template <int kWarps>
    __device__ void all(unsigned char* to, const Turns<kWarps>& turns) const {
        const int space = job.tokens * TokenSpace<W>::kBytes;
        for (int t = 0; t < job.tokens; ++t, to += TokenSpace<W>::kBytes) {
            for (int turn = 0; turn < turns.all(); turn += 2) {
                TokenChunk<W> x[2];
                for (int i = 0; i < 2; ++i) load(x[i], 0, t, turns.chunk(turn + i));
                x[0].split(to + turn * space, lane);
                if (turn + 1 < turns.all()) x[1].split(to + (turn + 1) * space, lane);
            }
        }
    }
};

/// sums += a staged chunk of rows times its tokens.
template <class W, class L, int kTiles, int kColumns, class Rows>
__device__ void add_chunk(const Job& job, const Rows& rows, unsigned char* own, const unsigned char* staged,
                          const unsigned char* tokens, int chunk, Sums<kTiles, kColumns>& sums) {
    const int lane = threadIdx.x % kWarp, group = lane / 4, member = lane % 4;
    const size_t offset = size_t(chunk) * W::kChunkBytes;
    if constexpr (W::kScales > 0) {
        if (lane < L::kRows) unpack_scales<W, L>(own, rows.staged(staged, lane, offset), lane);
        __syncwarp();
    }
    Chunk<W, kTiles, kColumns> own_chunk{{}, own, {}, group, member};
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) own_chunk.rows[i] = rows.staged(staged, group + 8 * i, offset);
    const auto space = [&](int token) { return tokens + min(token, job.tokens - 1) * TokenSpace<W>::kBytes; };
    for (int c = 0; c < kColumns; ++c) own_chunk.tokens[c] = space(group / 2 + 4 * c);
    Sums<kTiles, kColumns> of_chunk{};
    own_chunk.multiply(of_chunk, divide_up(min(job.k - chunk * W::kChunk, W::kChunk), kGroup));
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
        const float back = *reinterpret_cast<const float*>(space(member + 4 * c) + TokenSpace<W>::kInverse);
        for (int t = 0; t < kTiles; ++t)
            for (int i = 0; i < 2; ++i) sums[t][c][i] = fmaf(of_chunk[t][c][i], back, sums[t][c][i]);
    }
}

/// Adds the chains in order and the bias, and writes the results. all: [chain, token, row].
template <class W, int kTiles, int kColumns, int kWarps, bool kGated>
__device__ void finish(const Job& job, const BlockRows<W, 16 * kTiles, kGated>& rows,
                       const Sums<kTiles, kColumns> (&sums)[kChains / kWarps], const AroundView& around,
                       int sibling, float* all) {
    constexpr int kRows = 16 * kTiles, kEach = BlockRows<W, kRows, kGated>::kEach, kTokens = 4 * kColumns;
    const int warp = threadIdx.x / kWarp, group = threadIdx.x % kWarp / 4, member = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < kChains / kWarps; ++n) {
        for (int i = 0; i < 2 * kTiles * kColumns; ++i) {
            const int t = i / (2 * kColumns), c = i / 2 % kColumns, row = 16 * t + group + i % 2 * 8;
            all[((warp + n * kWarps) * kTokens + member + 4 * c) * kRows + row] = sums[n][t][c][i % 2];
        }
    }
    __syncthreads();
    const auto result = [&](const Tile& tile, int token, int i, int row) {
        float sum = 0;
        for (int c = 0; c < kChains; ++c) sum += all[(c * kTokens + token) * kRows + i];
        return sum + bias_at(job, tile, row);
    };
    for (int i = threadIdx.x; i < job.tokens * kEach; i += kWarps * kWarp) {
        const int token = i / kEach, at = i % kEach, row = rows.tile.row + at;
        if (row >= job.parts[rows.tile.part].rows) continue;
        float& out = out_at(job, rows.tile, sibling, token, row);
        if constexpr (kGated) {
            const float up = result(rows.gated(), token, kEach + at, row);
            out_at(job, rows.gated(), sibling, token, row) = up;
            out = activated(around.gate, result(rows.tile, token, at, row)) * gated(around.gate, up);
        } else {
            out = result(rows.tile, token, at, row);
            if (around.sum.data) around.sum.row(token)[row] += out;
        }
    }
}

template <class W, int kTiles, int kColumns, int kWarps, bool kGated>
__global__ void __launch_bounds__(kWarps* kWarp, kAtOnce<kColumns>* kChains / kWarps)
    few_kernel(const __grid_constant__ Job job, size_t row_bytes, const __grid_constant__ AroundView around,
               int n_tiles, Room room) {
    using L = Layout<W, kTiles, kColumns>;
    constexpr int kAll = kChains * L::kTokens * L::kRows;
    __shared__ RowScale by[kNormedTokens];
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int bytes = room.bytes<W, L>(job.tokens), x_bytes = job.tokens * TokenSpace<W>::kBytes;
    unsigned char* const own = shared_memory_behind_static() + warp * bytes;
    unsigned char* const tokens = own + room.tokens_at<W, L>();
    float* const all = reinterpret_cast<float*>(shared_memory_behind_static() + kWarps * bytes);
    const Turns<kWarps> turns{warp, divide_up(job.k, W::kChunk)};
    if (job.experts) wait_for_previous();  // which writes the experts' ids
    Stager<W, L, kWarps, kGated> stager{job, row_bytes, turns, own, n_tiles, room.stages, turns.all()};
    for (int i = 0; i < room.stages; ++i) stager.next();
    if (!job.experts) wait_for_previous();
    let_next_begin();
    if (around.normed.data) find_norms(job, around, by);
    const int sibling = kGated ? 0 : blockIdx.y;
    const Splitter<W> split{job, around, by, lane, sibling};
    if (room.kept) split.all(tokens, turns);

    int stage = 0, half = 0;
    for (int tile = blockIdx.x; tile < n_tiles; tile += gridDim.x, half ^= 1) {
        const BlockRows<W, L::kRows, kGated> rows(job, tile);
        Sums<kTiles, kColumns> sums[kChains / kWarps]{};
        int turn = 0;
#pragma unroll
        for (int c = 0; c < kChains / kWarps; ++c) {
            for (int i = turns.of_chain(c); i > 0; --i, ++turn) {
                const int chunk = turns.chunk(turn);
                unsigned char* const x = tokens + (room.kept ? turn * x_bytes : 0);
                if (!room.kept) split.one(x, rows.tile.head, chunk);
                room.stages == 1 ? wait_copies<0>() : wait_copies<1>();
                __syncwarp();
                add_chunk<W, L>(job, rows, own, own + L::kStagesAt + stage * L::kStage, x, chunk, sums[c]);
                __syncwarp();
                stager.next();
                if (++stage == room.stages) stage = 0;
            }
        }
        // Two halves of `all` are enough: a warp that still reads one has not come to the next tile's
        // barrier.
        finish<W, kTiles, kColumns, kWarps>(job, rows, sums, around, sibling, all + half * kAll);
    }
}

/// Weights that are read once: the memory from the first to the last, if an access window covers it, else the
/// largest.
std::span<const unsigned char> weights_of(const Device& device, const Job& job) {
    if (job.experts || job.group > 1) return {};  // experts may be anywhere; each sibling reads the weight
    const auto bytes_of = [&](const Part& part) {
        return part.stride * static_cast<size_t>(job.heads) * static_cast<size_t>(part.rows);
    };
    const std::span parts(job.parts, static_cast<size_t>(job.n_parts));
    const auto largest = std::ranges::max_element(parts, {}, bytes_of);
    const auto first = std::ranges::min_element(parts, {}, &Part::weight);
    const auto last = std::ranges::max_element(parts, {}, &Part::weight);
    const std::span all(first->weight, last->weight + bytes_of(*last));
    return all.size() <= device.window_bytes ? all : std::span(largest->weight, bytes_of(*largest));
}

/// Static shared memory of a block: what find_norms() has.
constexpr size_t kStatic = kNormedTokens * sizeof(RowScale) + kWarp * sizeof(float);

/// Dynamic shared memory of a block: its warps', and sums of chains for two tiles, since one may still be
/// read.
template <class W, int kTiles, int kColumns, int kWarps>
constexpr size_t block_bytes(int tokens, Room room) {
    using L = Layout<W, kTiles, kColumns>;
    return size_t(kWarps) * room.bytes<W, L>(tokens) + 2 * 4 * kChains * L::kTokens * L::kRows;
}

/// Whether it was started: shared memory must have room for all tokens, and a norm needs all threads.
template <class W, int kTiles, int kColumns, int kWarps>
bool start(const Device& device, const Job& job, const Around& around) {
    using L = Layout<W, kTiles, kColumns>;
    constexpr size_t kReserved = 1 << 10;  // of a multiprocessor's shared memory, by each block
    constexpr size_t kUnit = 128;          // in which it is given to blocks
    constexpr int kMost = kAtOnce<kColumns> * kChains / kWarps, kWanted = 2;
    const auto bytes = [&](Room room) { return block_bytes<W, kTiles, kColumns, kWarps>(job.tokens, room); };
    const auto at_once = [&](Room room) {
        const size_t each = (kStatic + bytes(room) + kUnit - 1) / kUnit * kUnit + kReserved;
        return std::min(int((device.shared_bytes + kReserved) / each), kMost);
    };
    const bool norms = kWarps * kWarp >= int(kThreads) && job.tokens <= kNormedTokens;
    Room room{1, 0};
    const bool fits = kStatic + bytes(room) <= device.shared_bytes;
    if (job.tokens > L::kTokens || !fits || (around.norm && !norms)) return false;
    const int enough = std::min(at_once(room), kWanted);
    const int turns = kChains / kWarps * divide_up(divide_up(job.k, W::kChunk), kChains);
    if (at_once({2, 0}) >= enough) room.stages = 2;
    if (job.all_heads() == 1 && at_once({room.stages, turns}) >= enough) room.kept = turns;
    const int tiles = around.gate ? divide_up(job.parts[0].rows, L::kRows / 2) : tiles_of(job, L::kRows);
    launch(device,
           around.gate ? &few_kernel<W, kTiles, kColumns, kWarps, true>
                       : &few_kernel<W, kTiles, kColumns, kWarps, false>,
           {.grid = dim3(std::min(tiles, divide_up(device.processors * at_once(room), job.group)), job.group),
            .block = dim3(kWarps * kWarp),
            .shared_bytes = bytes(room),
            .early = true,
            .once = weights_of(device, job)},
           job, W::row_bytes(job.k), AroundView(around), tiles, room);
    return true;
}

constexpr size_t kLeast = (99 << 10) - kStatic;  // dynamic shared memory that every device has

}  // namespace

bool few_tokens(const Device& device, DType dtype, const Job& job, const Around& around) {
    bool started = false;
    with_weight(dtype, [&](auto w) {
        using W = decltype(w);
        static_assert(block_bytes<W, 1, 1, 8>(kNormedTokens, {1, 0}) <= kLeast,
                      "linear_around() relies on it");
        started = start<W, 1, 1, 8>(device, job, around);
        if constexpr (W::kScales > 0) {
            static_assert(block_bytes<W, 1, 2, 4>(kFewTokens, {1, 0}) <= kLeast);
            started =
                started || start<W, 2, 2, 8>(device, job, around) || start<W, 1, 2, 4>(device, job, around);
        } else {
            static_assert(block_bytes<W, 1, 2, 8>(kFewTokens, {1, 0}) <= kLeast);
            started = started || start<W, 1, 2, 8>(device, job, around);
        }
    });
    return started;
}

}  // namespace slimrt::cuda
