// Absorbed decode attention without clusters: on sm_80, sm_89, newer devices by PTX, and devices whose
// clusters are too small. Blocks of a team wait for each other, so a launch has no more teams than run at
// once and is cooperative: CUDA runs all of its blocks or refuses it. Weights and partial scores go through
// device memory, a few kilobytes a tile that stay in the L2 cache.
#include <algorithm>

#include "kernels/cuda/absorbed_kernel.cuh"

namespace slimrt::cuda {
namespace {

struct Blocks {
    static constexpr bool kOneWarpLoads = false, kBoxes = false;
    static constexpr int kWeightArrivals = kProductWarps;  // beside those of scores_done()

    const int of_launch, number, rank;
    uint64_t* const arrived;

    __device__ Blocks(const Absorbed& x, const Barriers& barriers)
        : of_launch(static_cast<int>(blockIdx.x) / x.team),
          number(x.first_team + of_launch),
          rank(static_cast<int>(blockIdx.x) % x.team),
          arrived(barriers.arrived) {}

    static Shape shape(const Absorbed& x) {
        const int teams = std::min(x.teams, x.splits * x.sequences - x.first_team);
        return {.grid = dim3(x.team * teams), .cooperative = true};
    }
    static __device__ void begin() { __syncthreads(); }
    static __device__ void end() {}
    static __device__ void before_copies() {}
    static __device__ void wait(uint64_t* barrier, uint32_t parity) { barrier_wait(barrier, parity); }

    /// Copies 512 bytes at a time (cp.async).
    static __device__ void load_tile(const Absorbed& x, int rank, const TileSource& source, int warp,
                                     int warps, unsigned char* to, uint64_t* full, int lane) {
        for (int row = warp; row < kTileTokens; row += warps)
            copy_slice(x, rank, source, row, [&](int at, const void* from, int n) {
#pragma unroll 1
                for (int i = 16 * lane; i < n; i += 16 * 32)
                    copy16(to + at + i, static_cast<const unsigned char*>(from) + i);
            });
        barrier_arrive_after_copies(full);
    }

    /// A word's tag is the round of its slot, so that it needs neither a flag nor a fence.
    __device__ uint64_t* words_of(const Absorbed& x, int slot) const {
        return x.exchange.words + int64_t(of_launch) * x.exchange.team_words +
               slot * x.n_heads * kExchangeWords;
    }
    __device__ void send_weights(const Absorbed& x, const Ring& slot, int head, uint32_t pair, float shrink,
                                 int lane) const {
        uint64_t* const to = words_of(x, slot.at) + head * kExchangeWords;
        const uint32_t own = __shfl_sync(~0u, pair, 2 * lane % 32);
        if (lane < kExchangeWords)
            send_word(to + lane, lane < kExchangeWords - 1 ? own : __float_as_uint(shrink), slot.round + 1);
    }
    /// Words do not order memory accesses. This barrier does: between the block's score warps, which have
    /// read and converted the tile, and its product warps, which read it and then load another in its place.
    __device__ void scores_done(const Ring& slot, int) const { barrier_arrive(arrived + slot.at); }
    /// All product warps, each for a part of the words of at most kHeads heads.
    template <int kHeads>
    __device__ void fetch_weights(const Absorbed& x, const Ring& slot, int warp, int lane) const {
        constexpr int kThreads = 32 * kProductWarps,
                      kMax = (kExchangeWords * kHeads + kThreads - 1) / kThreads;
        const uint64_t* const from = words_of(x, slot.at);
        const WeightSlot to(x, slot.at);
        const int first = 32 * warp + lane, words = x.n_heads * kExchangeWords;
        uint32_t missing = 0;
#pragma unroll
        for (int j = 0; j < kMax; ++j)
            if (first + j * kThreads < words) missing |= 1u << j;
        while (missing) {
            uint64_t word[kMax] = {};  // all loads are issued before one is checked
#pragma unroll
            for (int j = 0; j < kMax; ++j)
                if (missing >> j & 1) word[j] = look_at_word(from + first + j * kThreads, slot.round + 1);
#pragma unroll
            for (int j = 0; j < kMax; ++j) {
                if (!(missing >> j & 1) || word[j] >> 32 != slot.round + 1) continue;
                const int i = first + j * kThreads, head = i / kExchangeWords, within = i % kExchangeWords;
                uint32_t* const weights = reinterpret_cast<uint32_t*>(to.weights + head * kWeightStride);
                const auto data = static_cast<uint32_t>(word[j]);
                (within < kExchangeWords - 1 ? weights[within]
                                             : reinterpret_cast<uint32_t*>(to.shrink)[head]) = data;
                missing &= ~(1u << j);
            }
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(arrived + slot.at);
    }

    __device__ float* parts_of(const Absorbed& x, int slot, int owner) const {
        return x.exchange.parts + int64_t(of_launch) * x.exchange.team_parts +
               (owner * kPartSlots + slot) * x.n_heads * kTileTokens;
    }
    __device__ uint32_t* count_of_parts(const Absorbed& x, int slot, int owner) const {
        const int64_t count = int64_t(of_launch) * x.exchange.team_counts + owner * kPartSlots + slot;
        return x.exchange.counts + count * (kCountBytes / sizeof(uint32_t));
    }
    __device__ void send_part(const Absorbed& x, int slot, int owner, int at, const float4& sum) const {
        *reinterpret_cast<float4*>(parts_of(x, slot, owner) + at) = sum;
    }
    __device__ const float* own_parts(const Absorbed& x, int slot) const { return parts_of(x, slot, rank); }
    __device__ void parts_sent(const Absorbed& x, int slot, int lane) const {
        if (lane < x.team) count_up(count_of_parts(x, slot, lane));
    }
    __device__ void wait_parts(const Absorbed& x, const Ring& slot, const WarpPlace&) const {
        const uint32_t each = x.team * (blockDim.x / 32 - kProductWarps);
        count_wait(count_of_parts(x, slot.at, rank), each * (slot.round + 1));
    }
};

}  // namespace

void absorbed_teams(const Device& device, const Absorbed& x) {
    const size_t bytes =
        reinterpret_cast<std::byte*>(x.exchange.parts) - reinterpret_cast<std::byte*>(x.exchange.counts);
    Absorbed some = x;
    for (some.first_team = 0; some.first_team < x.splits * x.sequences; some.first_team += x.teams) {
        check(cudaMemsetAsync(x.exchange.counts, 0, bytes, device.stream), "clearing what blocks exchange");
        start_team<Blocks>(device, some);
    }
}

}  // namespace slimrt::cuda
