// Absorbed decode attention as a team of blocks computes it, with specialised warps. A team has a split of a
// sequence's rows (split-K over the context). Each of its blocks has a slice of the columns, which it loads
// tile after tile into a ring of stages, and an equal share of the heads:
//   score warps    convert rows that are stored in bytes to f16, and compute scores of the slice, a warp a
//                  head (where heads are few, several tiles at once); of the block's own heads also the
//                  online softmax, whose weights go to all blocks of the team
//   product warps  multiply all heads' weights by the slice, [heads, slice] in registers
// So a byte of the cache is read once, and neither kind of warp waits for the other while stages are full:
// scores run ahead. Where scores are of whole rows (modes v, x, e), blocks first send partial scores to the
// heads' owners, a tile ahead of the softmax.
//
// Barriers. `full`, `empty`: stages; `free`: tiles of converted rows; `arrived`: weights of a slot; `parts`:
// partial scores; `meeting`: all score warps, for whole rows; `turns`: the order of a head's tiles, where
// weights become relative to a larger score. A block's scores are less than n_tiles ahead of its own
// products, and those less than n_tiles ahead of any other block's, whose weights they need. So with twice as
// many slots no weight is overwritten before it is used, without a barrier. Partial scores of a tile are sent
// after the block's warps have met, so after the softmax of the tile before the last: none is overwritten
// either.
//
// A Team defines how rows are loaded (load_tile), how warps wait at barriers (wait), and how weights and
// partial scores get to the other blocks: absorbed_sm90.cu, absorbed_sm80.cu.
#pragma once

#include "kernels/cuda/absorbed_heads.cuh"
#include "kernels/cuda/absorbed_product.cuh"
#include "kernels/cuda/device.h"

namespace slimrt::cuda {

struct Barriers {
    uint64_t *full, *empty, *free, *arrived, *parts, *meeting, *turns;
    __device__ explicit Barriers(const Absorbed& x) {
        full = reinterpret_cast<uint64_t*>(shared_memory() + x.at.barriers);
        empty = full + x.at.stages;
        free = empty + x.at.stages;
        arrived = free + x.at.n_tiles;
        parts = arrived + x.at.slots;
        meeting = parts + kPartSlots;
        turns = meeting + 1;
    }
    template <class Team>
    __device__ void init(const Absorbed& x, int score_warps) const {
        for (int i = 0; i < x.at.stages; ++i) {
            const int loaders = x.converted ? x.workers : kProductWarps;
            barrier_init(full + i, Loader<Team>::arrivals(loaders));
            barrier_init(empty + i, loaders);
        }
        for (int i = 0; i < x.at.n_tiles; ++i) barrier_init(free + i, kProductWarps);
        const int scored = x.wide.dim ? 1 : x.own_heads;
        for (int i = 0; i < x.at.slots; ++i) barrier_init(arrived + i, scored + Team::kWeightArrivals);
        for (int i = 0; i < kPartSlots; ++i) barrier_init(parts + i, 1);
        barrier_init(meeting, score_warps);
        for (int i = 0; i < x.phases * x.own_heads; ++i) barrier_init(turns + i, 1);
    }
};

/// Query heads whose keys are in this block's slice.
__device__ inline int heads_of_slice(const Absorbed& x, int rank) {
    return max(0, min(x.head.per_slice, x.n_heads - rank * x.head.per_slice));
}

/// Fills what stays as it is, queries, channel scales and biases, and initial states. Weights beyond the last
/// head become zeros, since they must not be NaN.
template <class Operand>
__device__ void prepare(const Absorbed& x, const AbsorbedWork& work) {
    const HeadScores& head = x.head;
    unsigned char* const shared = shared_memory();
    const int n = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
    constexpr float unit = key_unit<Operand>;
    const int first_head = work.rank * head.per_slice, heads = heads_of_slice(x, work.rank);
    auto* const q = reinterpret_cast<float*>(shared + x.at.q);
    for (int i = thread; i < heads * head.dim; i += n) {
        const int of = i / head.dim;
        q[i] =
            head.q[work.query * head.q_stride + int64_t(first_head + of) * head.q_head + i - of * head.dim] *
            (x.scale / unit);
    }
    prepare_key_rotations<Operand>(x, thread, n);
    auto* const scale = reinterpret_cast<uint16_t*>(shared + x.at.affine);
    const bool affine = head.row_scale || head.bias;
    for (int i = thread; affine && i < x.rows.slice; i += n) {
        const int column = work.rank * x.rows.slice + i;
        const bool there = column < head.n_heads * head.dim;
        scale[i] = to_f16(there && head.row_scale ? head.row_scale[column] : 1);
        scale[x.rows.slice + i] = to_f16(there && head.bias ? head.bias[column] : 0);
    }
    for (int slot = 0; slot < x.at.slots; ++slot) {
        const WeightSlot to(x, slot);
        const int begin = x.n_heads * kWeightStride / 4, end = x.at.slot_heads * kWeightStride / 4;
        for (int i = begin + thread; i < end; i += n) reinterpret_cast<uint32_t*>(to.weights)[i] = 0;
        for (int i = x.n_heads + thread; i < x.at.slot_heads; i += n) to.shrink[i] = 1;
    }
    const SoftmaxState state(x);
    for (int i = thread; i < x.own_heads; i += n) state.reference[i] = -kAbsorbedInfinity;
    for (int i = thread; i < x.phases * x.own_heads; i += n) state.of_phase[i] = -kAbsorbedInfinity;
    for (int i = thread; i < x.phases * x.own_heads * kTileTokens; i += n) state.sums[i] = 0;
}

/// Sends a block's partial scores of a tile to the heads' owners: its warps' sums, and its scores by heads.
template <class Team>
__device__ void send_parts(const Absorbed& x, const AbsorbedWork& work, const Team& team,
                           const WarpPlace& place, int slot) {
    unsigned char* const shared = shared_memory();
    const auto* const sums = reinterpret_cast<const float*>(shared + x.at.sums);
    const auto* const scores = reinterpret_cast<const float*>(shared + x.at.scores);
    const int first = work.rank * x.head.per_slice, heads = x.head.dim ? heads_of_slice(x, work.rank) : 0;
    for (int i = place.warp * 32 + place.lane; i < x.n_heads * 8; i += place.warps * 32) {
        const int head = i / 8, column = i % 8 * 4;
        float4 sum = {};
        const auto add = [&](const float* from) {
            const float4 some = *reinterpret_cast<const float4*>(from + column);
            sum = {sum.x + some.x, sum.y + some.y, sum.z + some.z, sum.w + some.w};
        };
        for (int warp = 0; warp < place.warps; ++warp)
            add(sums + (warp * x.at.slot_heads + head) * kSumStride);
        if (head >= first && head < first + heads) add(scores + (head - first) * kTileTokens);
        const int owner = head / x.own_heads, own = head % x.own_heads;
        team.send_part(x, slot, owner, (work.rank * x.own_heads + own) * kTileTokens + column, sum);
    }
    __syncwarp();
    team.parts_sent(x, slot, place.lane);
}

/// Softmax weights of the own heads, from all blocks' partial scores.
template <class Operand, class Team>
__device__ void softmax_of_parts(const Absorbed& x, const AbsorbedWork& work, const Team& team,
                                 const WarpPlace& place, int tile, int part, const Ring& slot) {
    if (place.warp == 0 && place.lane == 0) team.scores_done(slot, x.n_heads);
    for (int own = place.warp; own < x.own_heads; own += place.warps) {
        float score = 0;
        const float* const from = team.own_parts(x, part) + own * kTileTokens + place.lane;
        for (int rank = 0; rank < x.team; ++rank) score += from[rank * x.own_heads * kTileTokens];
        online_softmax<Operand>(x, work, team, tile, own, score, slot, place.lane, Ring(1), nullptr);
    }
}

/// Writes maximum and sum of the own heads' softmax over all phases, a warp for each head.
__device__ inline void write_ends(const Absorbed& x, const AbsorbedWork& work, const WarpPlace& place) {
    const SoftmaxState state(x);
    float2* const ends = reinterpret_cast<float2*>(x.ends) +
                         (int64_t(work.sequence) * x.splits + work.split) * x.n_heads +
                         work.rank * x.own_heads;
    for (int own = place.warp; own < x.own_heads; own += place.warps) {
        float2 all = {state.reference[own], 0};
        for (int phase = 0; phase < x.phases; ++phase) {
            const int at = phase * x.own_heads + own;
            const float sum = state.sums[at * kTileTokens + place.lane];
            if (sum != 0) all.y += sum * __expf(state.of_phase[at] - all.x);
        }
        for (int i = 16; i > 0; i /= 2) all.y += __shfl_xor_sync(~0u, all.y, i);
        if (place.lane == 0) ends[own] = all;
    }
}

/// A score warp. With the other `workers` of its phase it takes every `phases`-th tile.
template <class Team, class Operand, int kM, int kScoreWarps>
struct Scores {
    static constexpr bool kPanels = Team::kBoxes && !Operand::kConverted;
    const Absorbed& x;
    const AbsorbedWork& work;
    const Team& team;
    const Barriers& barriers;
    const int phase, worker;
    const Loader<Team> loader;
    const WarpPlace place;
    Ring stage, tile_at, meeting{1};

    __device__ Scores(const Absorbed& x, const AbsorbedWork& work, const Team& team, const Barriers& barriers,
                      int warp, int lane)
        : x(x),
          work(work),
          team(team),
          barriers(barriers),
          phase(warp / x.workers),
          worker(warp % x.workers),
          loader(x, work, barriers, worker, x.workers, x.phases, lane),
          place{warp, kScoreWarps, lane},
          stage(x.at.stages),
          tile_at(x.at.n_tiles) {
        if (Operand::kConverted && phase < x.phases) loader.start(phase);
    }

    /// Waits for all score warps.
    __device__ void meet() {
        __syncwarp();
        if (place.lane == 0) barrier_arrive(barriers.meeting);
        Team::wait(barriers.meeting, meeting.parity());
        meeting.next();
    }
    __device__ unsigned char* stage_data() const { return shared_memory() + stage.at * x.at.stage_bytes; }
    __device__ unsigned char* tile_data() const {
        return shared_memory() + x.at.tiles + tile_at.at * x.at.tile_bytes;
    }
    __device__ const float* of_stage(int offset) const {
        return reinterpret_cast<const float*>(stage_data() + offset);
    }

    /// Waits until a stage is full and, for conversion, a tile is free; converts the residual.
    __device__ void receive(int tile) {
        Team::wait(barriers.full + stage.at, stage.parity());
        if (Operand::kConverted) Team::wait(barriers.free + tile_at.at, tile_at.parity() ^ 1);
        if (x.residual.width)
            convert_residual(x, work, tile, stage_data(), tile_data(), worker, x.workers, place.lane);
    }
    __device__ void convert(int tile, const TilePart& part) const {
        if constexpr (Operand::kConverted)
            convert_rows(x.rows, work, tile, stage_data(), tile_data(), part, place.lane);
        else if (x.rows.panels && blank_rows(x.rows, work, tile, tile_data(), part, place.lane))
            Team::before_copies();
    }
    __device__ void next() {
        stage.next();
        tile_at.next();
    }

    /// A warp has stored heads for itself, and waits for others only to learn what weights are relative to.
    __device__ void by_heads() {
        const HeadScorer<Operand, kPanels> scorer(x, place.lane);
        Ring slot(x.at.slots), turn(x.phases);
        for (int tile = 0; tile < work.n_tiles; ++tile, next(), slot.next(), turn.next()) {
            if (turn.at != phase) continue;
            receive(tile);
            for (int stored = worker; stored * x.head.dim < x.rows.slice; stored += x.workers) {
                convert(tile, {stored * x.head.dim, x.head.dim, 0, 1});
                __syncwarp();
                for (int own = stored * x.head.group; own < (stored + 1) * x.head.group; ++own)
                    weigh(scorer, tile, stored, own, slot, turn);
            }
            if (Operand::kConverted) loader.done(tile, stage);
        }
    }
    /// Score and softmax weight of one of the own heads.
    __device__ void weigh(const auto& scorer, int tile, int stored, int own, const Ring& slot,
                          const Ring& turn) const {
        float score = scorer.score(tile_data(), of_stage(x.at.rope_rows), stored * x.head.dim, own);
        if (x.head.has_factors) {
            const int of = x.head.head_factors ? stored * kTileTokens : 0;
            score *= of_stage(x.at.factors)[of + work.nearest_visible(tile, place.lane)];
        }
        __syncwarp();  // all lanes have read the tile
        if (place.lane == 0) team.scores_done(slot, x.team);
        online_softmax<Operand>(x, work, team, tile, own, score, slot, place.lane, turn, barriers.turns);
    }

    /// Partial scores of a tile by heads.
    __device__ void read_heads(int heads) const {
        const HeadScorer<Operand, kPanels> scorer(x, place.lane);
        float* const scores = reinterpret_cast<float*>(shared_memory() + x.at.scores);
        for (int head = place.warp; head < heads; head += place.warps)
            scores[head * kTileTokens + place.lane] =
                scorer.score(tile_data(), of_stage(x.at.rope_rows), head / x.head.group * x.head.dim, head);
    }

    __device__ void of_whole_rows() {
        constexpr int kParts = Operand::kBf16 ? 2 : 1, kWideSteps = kMaxSlice / 16 / kScoreWarps;
        const WideScorer<Operand, kM, kParts, kWideSteps, kPanels> wide(x, work, place);
        const int heads = x.head.dim ? heads_of_slice(x, work.rank) : 0;
        float* const sums =
            reinterpret_cast<float*>(shared_memory() + x.at.sums) + place.warp * x.at.slot_heads * kSumStride;
        Ring slot(x.at.slots), part(kPartSlots), sent(kPartSlots);
        for (int tile = 0; tile <= work.n_tiles; ++tile) {
            if (tile < work.n_tiles) {
                receive(tile);
                convert(tile, {0, x.rows.slice, place.warp, place.warps});
                meet();
                read_heads(heads);
                wide.score(tile_data(), sums);
                meet();
                send_parts(x, work, team, place, sent.at);
                sent.next();
                if (Operand::kConverted) loader.done(tile, stage);
                next();
            }
            if (tile == 0) continue;
            team.wait_parts(x, part, place);
            softmax_of_parts<Operand>(x, work, team, place, tile - 1, part.at, slot);
            part.next();
            slot.next();
        }
    }
};

template <class Team, class Operand, int kM, int kGroups>
__device__ void multiply(const Absorbed& x, const AbsorbedWork& work, const Team& team,
                         const Barriers& barriers, int warp, int lane) {
    Products<Operand, kM, kGroups> products(x, warp, lane);
    Ring stage(x.at.stages), tile_at(x.at.n_tiles), slot(x.at.slots);
    const Loader<Team> loader(x, work, barriers, warp, kProductWarps, 1, lane);
    if (!Operand::kConverted) loader.start(0);
    for (int tile = 0; tile < work.n_tiles; ++tile, stage.next(), tile_at.next(), slot.next()) {
        if (!Operand::kConverted) Team::wait(barriers.full + stage.at, stage.parity());
        team.template fetch_weights<16 * kM>(x, slot, warp, lane);
        Team::wait(barriers.arrived + slot.at, slot.parity());
        products.add(shared_memory() + x.at.tiles + tile_at.at * x.at.tile_bytes, WeightSlot(x, slot.at));
        if (!Operand::kConverted) {
            loader.done(tile, stage);
            continue;
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(barriers.free + tile_at.at);
    }
    if (work.n_tiles) products.store(x, work, warp);
}

template <int kM>
constexpr int kScoreWarpsOf = score_warps_of(16 * kM);
template <int kM>
constexpr int kThreads = 32 * (kProductWarps + kScoreWarpsOf<kM>);

template <class Team, class Operand, int kM, int kGroups, bool kWide>
__global__ void __launch_bounds__(kThreads<kM>, 1) absorbed_kernel(const __grid_constant__ Absorbed x) {
    constexpr int kScoreWarps = kScoreWarpsOf<kM>;
    const Barriers barriers(x);
    const Team team(x, barriers);
    const AbsorbedWork work(x, team.number, team.rank);
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    if (threadIdx.x == 0) barriers.init<Team>(x, kScoreWarps);
    prepare<Operand>(x, work);
    Team::begin();

    if (warp < kProductWarps) {
        multiply<Team, Operand, kM, kGroups>(x, work, team, barriers, warp, lane);
    } else {
        Scores<Team, Operand, kM, kScoreWarps> scores(x, work, team, barriers, warp - kProductWarps, lane);
        if constexpr (kWide)
            scores.of_whole_rows();
        else if (scores.phase < x.phases)
            scores.by_heads();
        scores.meet();
        write_ends(x, work, scores.place);
    }
    __syncwarp();
    Team::end();
}

template <class Team, class Operand, int kM, int kGroups, bool kWide>
void start(const Device& device, const Absorbed& x) {
    Shape shape = Team::shape(x);
    shape.block = dim3(kThreads<kM>);
    shape.shared_bytes = static_cast<size_t>(x.at.bytes);
    launch(device, absorbed_kernel<Team, Operand, kM, kGroups, kWide>, shape, x);
}

template <class Team, class Operand>
void start_as(const Device& device, const Absorbed& x) {
    const int groups = (x.rows.slice + x.residual.slice) / kGroupColumns;
    if (x.wide.dim)
        return x.n_heads > 16 ? start<Team, Operand, 2, 4, true>(device, x)
                              : start<Team, Operand, 1, 4, true>(device, x);
    if (x.n_heads > 32) return start<Team, Operand, 4, 4, false>(device, x);
    if (x.n_heads <= 16) return start<Team, Operand, 1, 5, false>(device, x);
    groups > 4 * kProductWarps ? start<Team, Operand, 2, 5, false>(device, x)
                               : start<Team, Operand, 2, 4, false>(device, x);
}

template <class Team>
void start_team(const Device& device, const Absorbed& x) {
    if (x.bf16) return start_as<Team, Bf16Operand>(device, x);
    x.converted ? start_as<Team, CodeOperand>(device, x) : start_as<Team, F16Operand>(device, x);
}

}  // namespace slimrt::cuda
