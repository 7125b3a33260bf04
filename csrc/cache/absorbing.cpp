// The two branches of modes that absorb weights: which part of a step takes which, and dense rows.
#include <algorithm>

#include "cache/attend.h"

namespace slimrt {
namespace {

/// Consecutive tokens of a step that take the same branch; the sequences' `query` counts from `first`.
struct StepPart {
    bool absorb = false;
    int64_t first = 0, n = 0;
    size_t first_sequence = 0;
    std::vector<AttentionSequence> sequences;
};

/// Few queries, over rows that there are already (all of which may have aged).
bool pays_absorbed(const AttnInput& in, const AttentionSequence& s) {
    return s.position > 0 && s.n_queries <= in.config.head_dim && !in.chunk;
}

std::vector<StepPart> parts_of_step(const AttnInput& in) {
    std::vector<StepPart> parts;
    for (size_t i = 0; i < in.sequences.size(); ++i) {
        AttentionSequence s = in.sequences[i];
        const bool absorb = pays_absorbed(in, s);
        const bool joins = absorb && !parts.empty() && parts.back().absorb &&
                           parts.back().n + s.n_queries <= in.config.head_dim;
        if (!joins) parts.push_back({absorb, s.query, 0, i, {}});
        StepPart& part = parts.back();
        s.query -= int(part.first);
        part.n += s.n_queries;
        part.sequences.push_back(s);
    }
    return parts;
}

/// Queries over an encoder's rows do not see each other, so a sequence's may be divided among parts. A part
/// that divides one cannot use the sequences that were uploaded.
std::vector<StepPart> parts_over_encoder_states(const AttnInput& in, int64_t n_tokens) {
    std::vector<StepPart> parts;
    for (int64_t first = 0; first < n_tokens; first += in.config.head_dim) {
        StepPart part{true, first, std::min<int64_t>(in.config.head_dim, n_tokens - first), 0, {}};
        bool cut = false;
        for (AttentionSequence s : in.sequences) {
            const int64_t begin = std::max<int64_t>(s.query, first);
            const int64_t end = std::min<int64_t>(s.query + s.n_queries, first + part.n);
            if (begin >= end) continue;
            cut |= end - begin < s.n_queries;
            s.query = int(begin - first);
            s.n_queries = int(end - begin);
            part.sequences.push_back(s);
        }
        for (AttentionSequence& s : part.sequences)
            if (cut) s.uploaded = -1;
        parts.push_back(std::move(part));
    }
    return parts;
}

/// The older rows of a part; `sequences` gets what they refer to, an entry for each region.
std::vector<StoredRegion> older_rows_of(const StepPart& part, std::span<const StoredRegion> older,
                                        std::vector<std::vector<AttentionSequence>>& sequences) {
    std::vector<StoredRegion> of_part;
    for (const StoredRegion& region : older) {
        const auto first = region.sequences.begin() + part.first_sequence;
        sequences.emplace_back(first, first + part.sequences.size());
        for (AttentionSequence& s : sequences.back()) s.query -= int(part.first);
        of_part.push_back({region.aged, region.origin, sequences.back(), region.rows});
    }
    return of_part;
}

void store_dense(Backend& backend, const ReadInput& in, int64_t first, const std::vector<Tensor>& rows) {
    const Scratch::Scope scope(in.scratch);
    const Tensor slots = positions_from(backend, in.scratch, first, rows[0].rows);
    for (size_t p = 0; p < rows.size(); ++p) {
        const Tensor& to = in.dense.planes[p];
        backend.store(rows[p], {.base = to.data,
                                .dtype = to.dtype,
                                .width = int(to.cols),
                                .row_bytes = to.stride,
                                .slots = slots});
    }
}

}  // namespace

Written AbsorbingMode::write(Backend& backend, const WriteInput& in) const {
    Written written = write_rows(backend, in);
    const auto many = [&](const AttentionSequence& s) { return !pays_absorbed(in, s); };
    written.x = in.x;
    if (!in.shared) return written;
    if (std::ranges::any_of(in.sequences, many)) written.dense = dense_of(backend, in, written);
    written.x = {};
    return written;
}

void AbsorbingMode::read(Backend& backend, const ReadInput& in, const Written& written, Tensor out) const {
    for (const StepPart& part :
         in.config.cross ? parts_over_encoder_states(in, in.q.rows) : parts_of_step(in)) {
        const Scratch::Scope scope(in.scratch);
        ReadInput some = in;
        std::vector<std::vector<AttentionSequence>> sequences;
        sequences.reserve(in.older.size());
        const std::vector<StoredRegion> older = older_rows_of(part, in.older, sequences);
        some.sequences = part.sequences;
        some.older = older;
        some.positions = in.positions.cols_of(part.first, part.n);
        some.q = in.q.rows_of(part.first, part.n);
        const Written own = written.rows_of(part.first, part.n);
        const Tensor to = out.rows_of(part.first, part.n);
        part.absorb ? absorbed(backend, some, own, to) : materialise(backend, some, own, to);
    }
}

/// In a chunk, keeps the part's own dense rows for the chunks after it.
void AbsorbingMode::materialise(Backend& backend, const ReadInput& in, Written own, Tensor out) const {
    if (own.dense.empty()) own.dense = dense_of(backend, in, own);
    materialise_before(backend, in);
    materialised(backend, in, own, out);
    const int64_t position = in.sequences[0].position, end = position + own.dense[0].rows;
    if (!in.chunk || in.dense.end >= end) return;
    store_dense(backend, in, position, own.dense);
    in.dense.end = end;
}

/// Makes the dense rows of positions before a part that are missing.
void AbsorbingMode::materialise_before(Backend& backend, const ReadInput& in) const {
    constexpr int64_t kSegment = 512;
    const AttentionSequence& s = in.sequences[0];
    DenseRows& dense = in.dense;
    if (dense.table != s.table) {
        const int64_t window = in.config.window;
        dense.table = s.table;
        dense.end = !in.older.empty() ? 0 : window ? std::max(s.begin, s.position - window + 1) : s.begin;
    }
    int64_t origin = 0;  // end of the sinks, if rows age
    for (const StoredRegion& region : in.older) origin = std::max(origin, region.origin);
    while (dense.end < s.end) {
        const Scratch::Scope scope(in.scratch);
        const int64_t end = std::min(dense.end + kSegment, s.end);
        std::vector<Tensor> rows;
        for (const Tensor& plane : dense.planes) rows.push_back(in.scratch.f32(end - dense.end, plane.cols));
        dense_of_stored(backend, in, dense.end, end, rows);
        store_dense(backend, in, dense.end, rows);
        // On a dry backend the first whole segment is enough: no other needs more memory.
        dense.end = backend.dry() && dense.end >= origin ? s.end : end;
    }
}

void AbsorbingMode::materialised(Backend& backend, const ReadInput& in, const Written& own,
                                 Tensor out) const {
    const AttnConfig& c = in.config;
    const ScoreTerm scores[] = {
        {dense_rows(in.dense.planes[0], 0), own.dense[0], c.n_kv_heads, c.head_dim, in.q}};
    const ValueTerm values[] = {
        {dense_rows(in.dense.planes[1], 0), own.dense[1], c.n_kv_heads, c.value_width() / c.n_heads, out}};
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
