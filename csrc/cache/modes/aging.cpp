#include "cache/modes/aging.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace slimrt {

/// Without any that were chosen: one, of the types there are.
Levels AgingMode::levels(const AttnConfig& c) const {
    Levels levels = c.levels;
    if (levels.of.empty()) {
        levels = usual_levels();
        levels.of = {{.type_k = c.type_k, .type_v = c.type_v}};
    }
    return levels;
}

/// Of each of V's heads, that a level keeps.
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
    std::vector<Format> formats;  // the newest first
    for (const Level& level : levels(c).of) {
        const int by_channel = head_bytes(level.type_k, c.head_dim).scales ? kBlockTokens : 0;
        const int heads = value_heads(c);
        formats.insert(formats.begin(), {{"k", c.kv_width(), c.n_kv_heads, level.type_k, by_channel},
                                         {"v", heads * columns(c, level), heads, level.type_v}});
    }
    return formats;
}

Regions AgingMode::regions(const AttnConfig& c) const {
    const Levels l = levels(c);
    Regions regions{int(l.of.size()) + 1, l.sinks, l.recent, {}};
    for (size_t i = l.of.size() - 1; i > 0; --i) regions.shares.push_back(l.of[i].share);
    return regions;
}

Format AgingMode::dense_format(const AttnConfig& c) const {
    Format planes = format(c);
    for (Plane& plane : planes) plane.heads = 1;
    if (stores_latents()) planes.push_back(planes[1]);
    return planes;
}

/// Dense rows from projections of x.
std::vector<Tensor> AgingMode::rows_of(Backend& backend, const AttnInput& in, std::vector<Tensor> kv) const {
    const Tensor k_norm = in.prepared.model.k_norm;
    if (k_norm) backend.norm(NormKind::rms, kv[0], k_norm, {}, *in.config.qk_norm_eps, kv[0]);
    if (in.rope && !raw_keys()) backend.rope(kv[0], in.config.n_kv_heads, in.rope, in.positions);
    if (!stores_latents()) return kv;
    return {kv[0], latents_of(backend, in, kv[1]), kv[1]};
}

Written AgingMode::write_rows(Backend& backend, const WriteInput& in) const {
    const std::vector<Tensor> rows = rows_of(backend, in, in.projected);
    return {.planes = {rows[0], rows[1]}, .dense = rows};
}

std::vector<Tensor> AgingMode::dense_of(Backend& backend, const AttnInput& in, Tensor x) const {
    return rows_of(backend, in, project(backend, in.scratch, x, projections(in.prepared)));
}

void AgingMode::dense_of_stored(Backend& backend, const ReadInput& in, int64_t begin, int64_t end,
                                const std::vector<Tensor>& planes) const {
    const Tensor slots = positions_from(backend, in.scratch, 0, end - begin);
    const auto load = [&](const std::vector<Rows>& rows, const AttentionSequence& s, int64_t origin) {
        const int64_t first = std::max(begin, s.begin + origin), last = std::min(end, s.end + origin);
        for (size_t p = 0; p < rows.size() && first < last; ++p)
            backend.recode(rows[p], s.table, first - origin, last - origin,
                           {.base = planes[p].data,
                            .dtype = DType::F32,
                            .width = int(planes[p].cols),
                            .heads = rows[p].heads,
                            .row_bytes = planes[p].stride,
                            .slots = slots.cols_of(first - begin, last - first)});
    };
    for (const StoredRegion& region : in.older) load(region.rows, region.sequences[0], region.origin);
    load(in.rows, in.sequences[0], 0);
    if (stores_latents()) values_of(backend, in, planes[1], planes[2]);
}

/// The scores of rows whose positions count from `origin` on.
ScoreTerm AgingMode::scored_keys(const ReadInput& in, Rows rows, Tensor fresh, int64_t origin) const {
    ScoreTerm term{rows, fresh, in.config.n_kv_heads, in.config.head_dim, in.q};
    if (in.rope && raw_keys()) {
        term.rope = in.rope;
        term.rope.table = in.rope.table.rows_of(origin, in.rope.table.rows - origin);
    }
    return term;
}

/// Over the rows of each region as they are stored, those of few columns first.
void AgingMode::absorbed(Backend& backend, const ReadInput& in, const Written& own, Tensor out) const {
    const Scratch::Scope scope(in.scratch);
    const int heads = value_heads(in.config);
    const Tensor to = before_heads(in, out), lse = in.scratch.f32(out.rows, in.config.n_heads);
    bool merge = false;
    const auto attend = [&](std::span<const AttentionSequence> sequences, const std::vector<Rows>& rows,
                            const Written& fresh, int64_t origin, int dim) {
        const ScoreTerm scores[] = {scored_keys(in, rows[0], fresh.plane(0), origin)};
        const ValueTerm values[] = {{rows[1], fresh.plane(1), heads, dim, to}};
        AttentionArgs args = attention_args(in, scores, values);
        args.sequences = sequences;
        args.lse = lse;
        args.merge = std::exchange(merge, true);
        backend.attention(args);
    };
    std::vector<const StoredRegion*> older;
    for (const StoredRegion& region : in.older) older.push_back(&region);
    std::ranges::stable_sort(older, {}, [](const StoredRegion* r) { return r->rows[1].width; });
    const int all = in.config.kv_width() / heads;
    if (!older.empty() && older[0]->rows[1].head_dim() < all)  // zeros: rows of q from before the first one
        backend.unfold(in.q, 1, to.rows + to.cols / in.q.cols, to);
    for (const StoredRegion* region : older)
        attend(region->sequences, region->rows, {}, region->origin, region->rows[1].head_dim());
    attend(in.sequences, in.rows, own, 0, all);
    to_heads(backend, in, to, out);
}

void AgingMode::materialised(Backend& backend, const ReadInput& in, const Written& own, Tensor out) const {
    const AttnConfig& c = in.config;
    const ScoreTerm scores[] = {scored_keys(in, dense_rows(in.dense.planes[0], 0), own.dense[0], 0)};
    const ValueTerm values[] = {
        {dense_rows(in.dense.planes.back(), 0), own.dense.back(), c.n_kv_heads, c.head_dim, out}};
    AttentionArgs args = attention_args(in, scores, values);
    AttentionSequence all = in.sequences[0];
    if (!in.older.empty()) {
        all.begin = 0;
        all.uploaded = -1;
        args.sequences = {&all, 1};
    }
    backend.attention(args);
}

}  // namespace slimrt
