// Absorbed decode attention: which calls it serves, and how these are divided among blocks.
#include <algorithm>
#include <optional>

#include "kernels/cuda/absorbed.h"
#include "kernels/cuda/absorbed_plan.h"

namespace slimrt::cuda {
namespace {

constexpr int kMaxTeam = 32, kMaxHeads = 64, kMaxWideHeads = 32;
constexpr int kMaxStages = 6, kGoodStages = 4;
constexpr size_t kMostJobBytes = 32ull << 20;  // of a launch's partial results, unless blocks would idle
constexpr int kFirstCapability = 80;

template <class Number>
Number round_up(Number n, Number unit) {
    return (n + unit - 1) / unit * unit;
}

// Which calls it serves.

bool in_tiles(const Rows& rows) {
    const HeadBytes bytes = head_bytes(rows.dtype, rows.head_dim());
    return rows.block_tokens == kTileTokens && !rows.scale_tokens && rows.block_stride % 16 == 0 &&
           reinterpret_cast<uintptr_t>(rows.base) % 16 == 0 && bytes.elements % 2 == 0;
}

bool fits_rows(const Rows& rows) {
    switch (rows.dtype) {
        case DType::F16:
        case DType::BF16:
        case DType::Q8:
        case DType::FP8_E4M3:
        case DType::FP8_E5M2:
            return in_tiles(rows) && rows.head_dim() % 16 == 0;
        default:
            return false;
    }
}

bool is_wide(const ScoreTerm& term) {
    return term.n_heads == 1 && term.dim == term.stored.width && !term.rope && !term.row_scale && !term.bias;
}

bool fits_heads(const ScoreTerm& term, int n_heads) {
    const bool factors = term.row_scale && term.factors.base;
    if (term.dim % 16 || term.dim > kMaxDim || n_heads % term.n_heads) return false;
    if (term.n_heads * term.dim > term.stored.width || (factors && (term.bias || !in_tiles(term.factors))))
        return false;
    if (!term.rope) return true;
    if (reinterpret_cast<uintptr_t>(term.rope.table.data) % 16) return false;
    return term.rope.n_rot <= term.dim && term.rope.n_rot % (term.rope.interleaved ? 4 : 16) == 0;
}

/// Results are written four columns at a time.
bool fits_out(const Tensor& out, int n_heads) {
    constexpr int kColumns = 4, kBytes = kColumns * sizeof(float);
    return out.cols / n_heads % kColumns == 0 && out.stride % kBytes == 0 &&
           reinterpret_cast<uintptr_t>(out.data) % kBytes == 0;
}

bool fits_values(std::span<const ValueTerm> values, int n_heads) {
    if (values.empty() || values.size() > 2) return false;
    for (const ValueTerm& term : values)
        if (term.n_heads != 1 || term.dim != term.stored.width || !fits_out(term.out, n_heads)) return false;
    if (values.size() == 1) return true;
    const Rows& residual = values[1].stored;
    return residual.heads == 1 && residual.dtype != DType::F32 && residual.width % 4 == 0 &&
           in_tiles(residual);
}

bool fits(const AttentionArgs& args) {
    if (args.n_heads > kMaxHeads || !fits_values(args.values, args.n_heads)) return false;
    const Rows& rows = args.values[0].stored;
    int wide = 0;
    bool factors = false;  // of rows, with which scores of whole rows cannot be multiplied
    for (const ScoreTerm& term : args.scores) {
        factors |= term.row_scale && term.factors.base;
        if (term.stored.base != rows.base || term.stored.width != rows.width) return false;
        wide += is_wide(term);
        if (!is_wide(term) && !fits_heads(term, args.n_heads)) return false;
    }
    const int by_heads = static_cast<int>(args.scores.size()) - wide;
    if (wide && (factors || args.n_heads > kMaxWideHeads)) return false;
    return fits_rows(rows) && wide <= 1 && by_heads <= 1;
}

// How a call is divided among blocks.

const float* floats(Tensor t) { return t ? t.f32() : nullptr; }
int64_t stride_of(Tensor t) { return static_cast<int64_t>(t.stride / sizeof(float)); }

HeadScores head_scores(const ScoreTerm& term, int n_heads) {
    HeadScores out{.q = term.q.f32(),
                   .row_scale = floats(term.row_scale),
                   .bias = floats(term.bias),
                   .table = floats(term.rope.table),
                   .q_stride = stride_of(term.q),
                   .q_head = static_cast<int>(term.q.cols / n_heads),
                   .n_heads = term.n_heads,
                   .dim = term.dim,
                   .group = n_heads / term.n_heads,
                   .table_rows = term.rope.table.rows,
                   .n_rot = term.rope.n_rot,
                   .interleaved = term.rope.interleaved,
                   .has_factors = term.row_scale && term.factors.base,
                   .fresh = floats(term.fresh),
                   .fresh_factors = floats(term.fresh_factors),
                   .fresh_stride = stride_of(term.fresh)};
    if (!out.has_factors) return out;
    out.factors = RowsView(term.factors);
    out.head_factors = term.factors.width > 1;
    out.factors_stride = stride_of(term.fresh_factors);
    return out;
}

/// Offsets of the stored planes in a stage and of the operands in a tile; how large both are.
void lay_out_rows(Absorbed& x) {
    AbsorbedLayout& at = x.at;
    const auto take = [](int& end, int bytes) { return std::exchange(end, end + round_up(bytes, 16)); };
    at.tile_bytes = at.stage_bytes = 0;
    for (AbsorbedPlane* plane : {&x.rows, &x.residual}) {
        plane->stride = plane->panels ? kPanelRow : 2 * plane->slice + kPad;
        const int row = plane->panels ? 2 * plane->slice : plane->stride;
        plane->tile = take(at.tile_bytes, plane->slice ? kTileTokens * row : 0);
    }
    if (!x.converted) at.stage_bytes = at.tile_bytes;
    if (x.converted) {
        x.rows.raw_row = x.rows.piece;
        x.rows.raw_piece = kTileTokens * (x.rows.piece + x.rows.rows.head_scales);
        x.rows.raw = take(at.stage_bytes, x.rows.pieces * x.rows.raw_piece);
    }
    if (x.residual.width) {
        x.residual.raw_row = round_up(2 * x.residual.slice, 16) + 32;
        x.residual.raw =
            take(at.stage_bytes, kTileTokens * (x.residual.raw_row + x.residual.rows.head_scales));
    }
    at.rope_rows = take(at.stage_bytes, x.head.table ? kTileTokens / 8 * x.head.n_rot * 4 : 0);
    at.factors = take(at.stage_bytes, x.head.has_factors ? x.head.factors_of_slice() * kTileTokens * 4 : 0);
    if (x.rows.panels) at.stage_bytes = round_up(at.stage_bytes, kPanelAlign);
}

/// A score warp has heads of the slice for itself; where heads are few, more than one tile is scored at once,
/// in as many phases. No more of them than tiles, since barriers tell only odd rounds from even ones; where
/// rows are converted, a phase refills its own stages, so another one must be full meanwhile.
void assign_score_warps(Absorbed& x, int stages, int tiles) {
    const int warps = score_warps_of(x.n_heads);
    x.workers = x.wide.dim ? warps : std::min(warps, x.rows.slice / x.head.dim);
    x.phases = std::min({warps / x.workers, x.converted ? stages - 1 : stages, tiles});
    const int columns = std::min(x.rows.piece, x.wide.dim ? x.rows.slice : x.head.dim);
    x.rows.of_unit = 65536 * 8 / columns + 1;  // exact for numerators of at most 32
}

/// Offsets in shared memory, with so many stages and tiles of converted rows.
void lay_out(Absorbed& x, int stages, int tiles) {
    AbsorbedLayout& at = x.at;
    constexpr int kWideWarps = 8, kFloat = sizeof(float);
    assign_score_warps(x, stages, tiles);
    int end = stages * at.stage_bytes;
    const auto take = [&](int bytes) { return std::exchange(end, end + round_up(bytes, 16)); };
    at.stages = stages;
    at.n_tiles = tiles;
    at.tiles = x.converted ? take(tiles * at.tile_bytes) : 0;
    if (!x.converted) at.tile_bytes = at.stage_bytes;
    at.slot_heads = x.n_heads > 32 ? 64 : x.n_heads > 16 ? 32 : 16;
    at.slots = 2 * tiles;
    at.slot_bytes = at.slot_heads * (kWeightStride + kFloat);
    at.weights = take(at.slots * at.slot_bytes);
    at.q = take(x.head.per_slice * x.head.dim * kFloat);
    at.key_rotations = take(x.head.dim / 16 * 32 * 16);
    at.affine = take(x.head.row_scale || x.head.bias ? 4 * x.rows.slice : 0);
    at.scores = take(x.wide.dim ? x.head.per_slice * kTileTokens * kFloat : 0);
    at.sums = take(x.wide.dim ? kWideWarps * at.slot_heads * kSumStride * kFloat : 0);
    at.parts = take(x.wide.dim && !x.via_memory ? kPartSlots * x.n_heads * kTileTokens * kFloat : 0);
    at.references = take(x.own_heads * kFloat);
    at.state = take(x.phases * x.own_heads * (1 + kTileTokens) * kFloat);
    const int barriers = 2 * stages + tiles + at.slots + kPartSlots + 1 + x.phases * x.own_heads;
    at.barriers = take(barriers * static_cast<int>(sizeof(uint64_t)));
    at.bytes = end;
}

/// As many stages as fit; false: too few do. A stage is refilled one tile late, and partial scores of whole
/// rows are sent one tile before the softmax.
bool fill_memory(Absorbed& x, size_t shared_bytes) {
    lay_out_rows(x);
    const int least = x.wide.dim ? 3 : 2;
    for (int stages = kMaxStages; stages >= least; --stages) {
        const int tiles = x.converted ? std::min(stages, 3) : stages;
        lay_out(x, stages, tiles);
        if (static_cast<size_t>(x.at.bytes) <= shared_bytes) return true;
    }
    return false;
}

/// Divides columns and heads among a team of so many blocks; false if that is not possible.
bool divide_columns(Absorbed& x, int team, size_t shared_bytes) {
    const int width = x.rows.width, unit = has_groups(x.residual.rows.dtype) ? 32 : kGroupColumns;
    if (x.n_heads % team || width % (team * kGroupColumns)) return false;
    x.team = team;
    x.own_heads = x.n_heads / team;
    const int slice = x.rows.slice = width / team, stored = x.rows.rows.head_dim;
    x.rows.by_heads = stored < width;
    x.rows.piece = std::min(slice, stored);
    x.rows.pieces = slice / x.rows.piece;
    x.rows.of_piece = 65536 * 8 / x.rows.piece + 1;
    x.rows.slice_bytes =
        x.rows.by_heads ? x.rows.pieces * (x.rows.rows.head_elements + x.rows.rows.head_scales) * kTileTokens
                        : bytes_of(x.rows.rows.dtype, slice);
    if (slice > kMaxSlice || (stored < width && slice % stored)) return false;
    x.rows.panels =
        !x.via_memory && !x.converted && slice % kPanelColumns == 0 && stored % kPanelColumns == 0;
    x.rows.at_once = x.rows.panels || (!x.via_memory && x.converted && x.rows.by_heads);
    x.residual.slice = x.residual.width ? round_up((x.residual.width + team - 1) / team, unit) : 0;
    const int groups = (slice + x.residual.slice) / kGroupColumns;
    if (groups > kProductWarps * (x.n_heads > 32 ? 4 : 5)) return false;
    if (x.head.dim) {
        if (slice % x.head.dim) return false;
        x.head.per_slice = slice / x.head.dim * x.head.group;
        if (!x.wide.dim && x.head.per_slice != x.own_heads) return false;
    }
    return fill_memory(x, shared_bytes);
}

/// How many teams run at once: a block takes a multiprocessor's shared memory.
int teams_at_once(const Absorbed& x, const Device& device, int team) {
    return x.via_memory || team == 1 ? device.processors / team : device.clusters[team];
}

/// The number of splits with which the last wave of teams is nearly full; more waves cost a little.
int splits_of(int sequences, int teams, int most_jobs) {
    constexpr double kWaveCost = 0.02;
    const int most = std::min({(teams + sequences - 1) / sequences + 3, kMaxSplits, most_jobs / sequences});
    int best = 1;
    double best_use = -1;
    for (int splits = 1; splits <= most; ++splits) {
        const int jobs = splits * sequences, waves = (jobs + teams - 1) / teams;
        const double use = double(jobs) / (double(waves) * teams) - kWaveCost * waves;
        if (use > best_use + 1e-9) {
            best_use = use;
            best = splits;
        }
    }
    return best;
}

/// The smallest cluster that fits. Without clusters the smallest team with enough stages, since weights take
/// longer through device memory, else the one with the most. False: none fits.
bool choose_team(Absorbed& x, const Device& device) {
    const int most = std::min(x.via_memory ? kMaxTeam : kMaxCluster, device.processors);
    const int enough = x.via_memory ? kGoodStages : 1;
    int best = 0, stages = 0;
    for (int team = 1; team <= most && stages < enough; ++team) {
        if (teams_at_once(x, device, team) == 0 || !divide_columns(x, team, device.shared_bytes) ||
            x.at.stages <= stages)
            continue;
        best = team;
        stages = x.at.stages;
    }
    x.teams = best > 0 ? teams_at_once(x, device, best) : 0;
    return best > 0 && divide_columns(x, best, device.shared_bytes);
}

/// Clusters where the device has large enough ones.
bool choose_teams(Absorbed& x, const Device& device) {
    x.via_memory = device.capability != kClusterCapability;
    if (choose_team(x, device)) return true;
    if (x.via_memory) return false;
    x.via_memory = true;
    return choose_team(x, device);
}

/// For any sequences; nullopt: such terms are not served.
std::optional<Absorbed> plan(const Device& device, const AttentionArgs& args) {
    if (device.capability < kFirstCapability || !fits(args)) return std::nullopt;
    Absorbed x{.n_heads = args.n_heads,
               .scale = args.scale,
               .window = args.window,
               .finish = ScoreFinish(args, 1),
               .lse = args.lse ? args.lse.f32() : nullptr,
               .lse_stride = stride_of(args.lse),
               .merge = args.merge};
    for (size_t t = 0; t < args.values.size(); ++t) {
        const ValueTerm& term = args.values[t];
        AbsorbedPlane& plane = t == 0 ? x.rows : x.residual;
        plane.rows = RowsView(term.stored);
        plane.width = term.stored.width;
        x.values[t] = {floats(term.fresh), term.out.f32(), stride_of(term.fresh), stride_of(term.out),
                       static_cast<int>(term.out.cols / args.n_heads)};
        x.columns += plane.width;
    }
    for (const ScoreTerm& term : args.scores) {
        if (is_wide(term)) {
            x.wide = {term.q.f32(),
                      floats(term.fresh),
                      stride_of(term.q),
                      stride_of(term.fresh),
                      static_cast<int>(term.q.cols / args.n_heads),
                      term.dim};
        } else {
            x.head = head_scores(term, args.n_heads);
        }
    }
    x.bf16 = x.rows.rows.dtype == DType::BF16;
    x.converted = !x.bf16 && x.rows.rows.dtype != DType::F16;
    if (!choose_teams(x, device)) return std::nullopt;
    if (x.via_memory) {
        x.exchange.team_counts = x.wide.dim ? x.team * kPartSlots : 0;
        x.exchange.team_words = x.at.slots * x.n_heads * kExchangeWords;
        x.exchange.team_parts = x.wide.dim ? x.team * kPartSlots * x.n_heads * kTileTokens : 0;
    }
    return x;
}

/// Bytes for so many jobs, splits of sequences. Sets x's pointers into the workspace, if there is one.
size_t divide_workspace(Absorbed& x, size_t jobs, std::byte* workspace) {
    size_t end = 0;
    const auto take = [&]<class T>(T*& part, size_t bytes) {
        if (workspace) part = reinterpret_cast<T*>(workspace + end);
        end += round_up(bytes, size_t{16});
    };
    if (x.via_memory) {
        const size_t teams = std::min(jobs, size_t(x.teams));
        take(x.exchange.counts, teams * x.exchange.team_counts * kCountBytes);
        take(x.exchange.words, teams * x.exchange.team_words * sizeof(uint64_t));
        take(x.exchange.parts, teams * x.exchange.team_parts * sizeof(float));
    }
    take(x.partial, jobs * x.n_heads * x.columns * sizeof(float));
    take(x.ends, jobs * x.n_heads * 2 * sizeof(float));
    return end;
}

/// The most jobs of a launch: as many as kMostJobBytes allow, at least as many as run at once.
int most_jobs(Absorbed& x) {
    const size_t fit = kMostJobBytes / divide_workspace(x, 1, nullptr), teams = x.teams;
    return static_cast<int>(std::clamp(fit, teams, kMaxSplits * teams));
}

}  // namespace

std::optional<AbsorbedShape> absorbed_shape(const Device& device, const AttentionArgs& args) {
    std::optional<Absorbed> x = plan(device, args);
    if (!x) return std::nullopt;
    const int jobs = most_jobs(*x);
    return AbsorbedShape{x->team, x->teams, jobs, x->via_memory, divide_workspace(*x, jobs, nullptr)};
}

bool absorbed_can(const Device& device, const AttentionArgs& args) { return plan(device, args).has_value(); }

size_t absorbed_workspace(const Device& device, const AttentionArgs& args) {
    const std::optional<AbsorbedShape> shape = absorbed_shape(device, args);
    return shape ? shape->workspace : 0;
}

void absorbed(const Device& device, const AttentionArgs& args, const PlacedSequence* placed, int n_placed,
              int query_shift, std::byte* workspace) {
    Absorbed x = *plan(device, args);
    const int jobs = most_jobs(x);
    x.query_shift = query_shift;
    for (int first = 0; first < n_placed; first += jobs) {
        x.placed = placed + first;
        x.sequences = std::min(jobs, n_placed - first);
        x.splits = splits_of(x.sequences, x.teams, jobs);
        divide_workspace(x, size_t(x.sequences) * x.splits, workspace);
        x.via_memory ? absorbed_teams(device, x) : absorbed_clusters(device, x);
        absorbed_merge(device, x);
    }
}

}  // namespace slimrt::cuda
