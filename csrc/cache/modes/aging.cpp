#include "cache/modes/aging.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace slimrt {
namespace {

/// The region whose rows are forgotten; nullptr: none.
const StoredRegion* forgotten(std::span<const StoredRegion> older) {
    for (const StoredRegion& region : older)
        if (region.rows.empty() && region.sequences[0].begin < region.sequences[0].end) return &region;
    return nullptr;
}

constexpr int64_t kRecoded = 128;  // rows whose latents are predicted at a time

/// Loads rows [begin, end) as f32. Heads may be wider in `to` than stored: the missing columns become zeros.
void load_wide(Backend& backend, Scratch& scratch, const Rows& rows, const int32_t* table, int64_t begin,
               int64_t end, Tensor to) {
    const Scratch::Scope scope(scratch);
    backend.recode(rows, table, begin, end,
                   {.base = to.data,
                    .dtype = DType::F32,
                    .width = int(to.cols),
                    .heads = rows.heads,
                    .row_bytes = to.stride,
                    .slots = positions_from(backend, scratch, 0, end - begin)});
}

/// The rows that slots belong to.
Rows view_of(const Slots& slots) {
    return {.base = slots.base,
            .dtype = slots.dtype,
            .width = slots.width,
            .heads = slots.heads,
            .row_bytes = slots.row_bytes,
            .block_stride = slots.block_stride,
            .block_tokens = slots.block_tokens,
            .scale_tokens = slots.scale_tokens};
}

}  // namespace

/// The levels that were chosen, else the default ones with a single level of type_k and type_v.
Levels AgingMode::levels(const AttnConfig& c) const {
    Levels levels = c.levels;
    if (levels.of.empty()) {
        levels = default_levels();
        levels.of = {{.type_k = c.type_k, .type_v = c.type_v}};
    }
    return levels;
}

/// How many columns of each of V's heads a level keeps.
int AgingMode::columns(const AttnConfig& c, const Level& level) const {
    const int all = c.kv_width() / value_heads(c);
    return std::clamp(int(std::lround(level.part * all)), 1, all);
}

std::string AgingMode::refusal(const AttnConfig& c) const {
    return c.window ? "rows behind a window are given back, so none grow old" : "";
}

Format AgingMode::format(const AttnConfig& c) const {
    const Level newest = levels(c).of.back();
    return {{"k", c.kv_width(), c.n_kv_heads, dense_type(newest.type_k)},
            {"v", c.kv_width(), value_heads(c), dense_type(newest.type_v)}};
}

std::vector<Format> AgingMode::older_formats(const AttnConfig& c) const {
    std::vector<Format> formats;  // newest first
    for (const Level& level : levels(c).of) {
        const int by_channel = head_bytes(level.type_k, c.head_dim).scales ? kBlockTokens : 0;
        const int heads = value_heads(c);
        if (level.part == 0) {
            formats.insert(formats.begin(), Format{});
            continue;
        }
        formats.insert(formats.begin(), {{"k", c.kv_width(), c.n_kv_heads, level.type_k, by_channel},
                                         {"v", heads * columns(c, level), heads, level.type_v}});
    }
    return formats;
}

Regions AgingMode::regions(const AttnConfig& c) const {
    const Levels l = levels(c);
    Regions regions{int(l.of.size()) + 1, l.sinks, l.recent, {}, l.of[0].part == 0};
    for (size_t i = l.of.size() - 1; i > 0; --i)
        regions.shares.push_back({l.of[i].share, l.of[i].rows / kBlockTokens});
    return regions;
}

Format AgingMode::dense_format(const AttnConfig& c) const {
    Format planes = format(c);
    for (Plane& plane : planes) plane.heads = 1;
    if (has_latents()) planes.push_back(planes[1]);
    return planes;
}

size_t AgingMode::recoding_scratch(const AttnConfig& c) const {
    if (!c.levels.predicts) return 0;
    constexpr size_t kTensors = 4, kAligned = 64;  // keys, latents, and two for predictions
    return kTensors * (kRecoded * c.kv_width() * sizeof(float) + kAligned) + kRecoded * sizeof(int32_t) +
           kAligned;
}

/// From the latents of rows that age, what their stored keys predict is subtracted; it is added when they
/// come back.
void AgingMode::recode(Backend& backend, const AttnInput& in, const Recoding& r) const {
    if (!in.config.levels.predicts) return CacheMode::recode(backend, in, r);
    for (int64_t begin = r.begin, n; begin < r.end; begin += n) {
        const Scratch::Scope scope(in.scratch);
        n = std::min<int64_t>(kRecoded, r.end - begin);
        const Tensor keys = in.scratch.f32(n, in.config.kv_width());
        const Tensor latents = in.scratch.f32(n, in.config.kv_width());
        std::vector<Slots> to(r.to.begin(), r.to.end());
        for (Slots& plane : to) plane.slots = plane.slots.cols_of(begin - r.begin, n);
        load_wide(backend, in.scratch, r.from[1], r.table, begin, begin + n, latents);
        if (r.from_aged) {
            backend.load(r.from[0], r.table, begin, begin + n, keys);
            add_predicted(backend, in, keys, 1, latents);
        }
        backend.recode(r.from[0], r.table, begin, begin + n, to[0]);
        if (r.to_aged) {
            const int64_t first = r.to_begin + begin - r.begin;
            backend.load(view_of(to[0]), r.to_table, first, first + n, keys);
            add_predicted(backend, in, keys, -1, latents);
        }
        Rows rows = dense_rows(latents, 0);
        rows.heads = to[1].heads;
        backend.recode(rows, nullptr, 0, n, to[1]);
    }
}

/// Dense rows, from projections of x.
std::vector<Tensor> AgingMode::rows_of(Backend& backend, const AttnInput& in, std::vector<Tensor> kv) const {
    clamp(backend, in.config, kv);
    norm_heads(backend, in.config, in.prepared.model.k_norm, kv[0], kv[0]);
    norm_values(backend, in.config, kv[1]);
    if (in.rope && !raw_keys()) backend.rope(kv[0], in.config.n_kv_heads, in.rope, in.positions);
    if (has_latents()) kv = {kv[0], latents_of(backend, in, kv[1]), kv[1]};
    if (levels(in.config).eager) {
        kv[1] = as_kept(backend, in, kv[1]);
        if (has_latents()) values_of(backend, in, kv[1], kv[2]);
    }
    return kv;
}

/// x, what is stored of V, as it reads back from the newest level: the first columns, rounded.
Tensor AgingMode::as_kept(Backend& backend, const AttnInput& in, Tensor x) const {
    const Level level = levels(in.config).of.back();
    const int heads = value_heads(in.config), all = int(x.cols) / heads, kept = columns(in.config, level);
    const Tensor out = in.scratch.f32(x.rows, x.cols);
    backend.unfold(x, 1, 2 * x.rows, out);  // zeros: windows before the first row of x
    for (int head = 0; head < heads; ++head)
        backend.quantize_dequantize(x.cols_of(head * all, kept), level.type_v, 1,
                                    out.cols_of(head * all, kept));
    return out;
}

Written AgingMode::write_rows(Backend& backend, const WriteInput& in) const {
    const std::vector<Tensor> rows = rows_of(backend, in, in.projected);
    return {.planes = {rows[0], rows[1]}, .dense = rows};
}

std::vector<Tensor> AgingMode::dense_of(Backend& backend, const AttnInput& in, const Written& own) const {
    return rows_of(backend, in, project(backend, in.scratch, own.x, projections(in.prepared)));
}

void AgingMode::dense_of_stored(Backend& backend, const ReadInput& in, int64_t begin, int64_t end,
                                const std::vector<Tensor>& planes) const {
    const auto load = [&](const std::vector<Rows>& rows, const AttentionSequence& s, int64_t origin,
                          bool predicts) {
        const int64_t first = std::max(begin, s.begin + origin), last = std::min(end, s.end + origin);
        if (rows.empty() || first >= last) return;
        const auto part = [&](const Tensor& plane) { return plane.rows_of(first - begin, last - first); };
        for (size_t p = 0; p < rows.size(); ++p)
            load_wide(backend, in.scratch, rows[p], s.table, first - origin, last - origin, part(planes[p]));
        if (predicts) add_predicted(backend, in, part(planes[0]), 1, part(planes[1]));
    };
    for (const StoredRegion& region : in.older)
        load(region.rows, region.sequences[0], region.origin, in.config.levels.predicts && region.aged);
    load(in.rows, in.sequences[0], 0, false);
    if (has_latents()) values_of(backend, in, planes[1], planes[2]);
}

/// The term of rows whose positions count from `origin`.
ScoreTerm AgingMode::scored_keys(const ReadInput& in, Rows rows, Tensor fresh, int64_t origin) const {
    ScoreTerm term{rows, fresh, in.config.n_kv_heads, in.config.head_dim, in.q};
    if (in.rope && raw_keys()) {
        term.rope = in.rope;
        term.rope.table = in.rope.table.rows_of(origin, in.rope.table.rows - origin);
    }
    return term;
}

/// Attention over each region's rows as they are stored, those of few columns first, so that each merge
/// rescales all columns so far. Where keys predict latents, aged keys are summed too, for to_heads().
void AgingMode::absorbed(Backend& backend, const ReadInput& in, const Written& own, Tensor out) const {
    const Scratch::Scope scope(in.scratch);
    const int heads = value_heads(in.config), all = in.config.kv_width() / heads;
    const Tensor to = before_heads(in, out), lse = in.scratch.f32(out.rows, in.config.n_heads);
    std::vector<const StoredRegion*> older;
    for (const StoredRegion& region : in.older)
        if (!region.rows.empty()) older.push_back(&region);
    std::ranges::stable_sort(older, {},
                             [](const StoredRegion* r) { return std::pair(!r->aged, r->rows[1].width); });
    const auto sinks = std::ranges::find_if(older, [](const StoredRegion* r) { return !r->aged; });
    const bool predicts = in.config.levels.predicts && sinks != older.begin();
    const Tensor keys = predicts ? before_heads(in, out) : Tensor{};
    bool merge = false;
    const auto attend = [&](std::span<const AttentionSequence> sequences, const std::vector<Rows>& rows,
                            const Written& fresh, int64_t origin, bool sum_keys) {
        const int dim = rows[1].head_dim();
        const ScoreTerm scores[] = {scored_keys(in, rows[0], fresh.plane(0), origin)};
        const ValueTerm values[] = {{rows[1], fresh.plane(1), heads, dim, to},
                                    {rows[0], {}, heads, all, keys}};
        AttentionArgs args = attention_args(in, scores, std::span(values, sum_keys ? 2 : 1));
        args.sequences = sequences;
        args.lse = lse;
        args.merge = std::exchange(merge, true);
        if (args.merge) args.sinks = {};
        backend.attention(args);
    };
    if (!older.empty() && older[0]->rows[1].head_dim() < all)  // zeros: windows before the first row of q
        backend.unfold(in.q, 1, to.rows + to.cols / in.q.cols, to);
    for (auto region = older.begin(); region != sinks; ++region)
        attend((*region)->sequences, (*region)->rows, {}, (*region)->origin, predicts);
    const Tensor before = predicts ? in.scratch.f32(lse.rows, lse.cols) : Tensor{};
    if (predicts) backend.unfold(lse, 1, 0, before);  // a copy
    for (auto region = sinks; region != older.end(); ++region)
        attend((*region)->sequences, (*region)->rows, {}, (*region)->origin, false);
    attend(in.sequences, in.rows, own, 0, false);
    if (predicts) backend.reweigh(keys, before, lse);
    to_heads(backend, in, to, keys, out);
}

void AgingMode::materialised(Backend& backend, const ReadInput& in, const Written& own, Tensor out) const {
    const AttnConfig& c = in.config;
    const ScoreTerm scores[] = {scored_keys(in, dense_rows(in.dense.planes[0], 0), own.dense[0], 0)};
    const ValueTerm values[] = {
        {dense_rows(in.dense.planes.back(), 0), own.dense.back(), c.n_kv_heads, c.head_dim, out}};
    AttentionArgs args = attention_args(in, scores, values);
    if (in.older.empty()) return backend.attention(args);
    AttentionSequence all = in.sequences[0];
    all.begin = 0;
    all.uploaded = -1;
    args.sequences = {&all, 1};
    const Scratch::Scope scope(in.scratch);
    if (const StoredRegion* const gap = forgotten(in.older)) {
        AttentionSequence before = all;
        before.end = gap->sequences[0].begin + gap->origin;
        before.fresh = false;
        all.begin = gap->sequences[0].end + gap->origin;
        if (before.end > 0) {
            args.lse = in.scratch.f32(out.rows, c.n_heads);
            args.sequences = {&before, 1};
            backend.attention(args);
            args.sequences = {&all, 1};
            args.merge = true;
            args.sinks = {};
        }
    }
    backend.attention(args);
}

}  // namespace slimrt
