// What the modes share: projections, bias folding, the absorbed and the materialised branch.
#include <algorithm>
#include <cmath>

#include "cache/modes/modes.h"
#include "core/error.h"

namespace slimrt {

Plane whole_plane(const char* name, int width, int heads, DType type) {
    return {name, width, head_bytes(type, width / heads).scales ? heads : 1, type};
}

namespace {

/// Appends a product of x with each projection's weight, and its result in fresh scratch.
void add_products(Scratch& scratch, Tensor x, std::initializer_list<Projection> projections,
                  std::vector<Product>& products, std::vector<Tensor>& out) {
    for (const auto& [weight, bias] : projections) {
        out.push_back(scratch.f32(x.rows, weight.rows));
        products.push_back({weight, bias, out.back()});
    }
}

}  // namespace

std::vector<Tensor> project(Backend& backend, Scratch& scratch, Tensor x,
                            std::initializer_list<Projection> projections) {
    std::vector<Product> products;
    std::vector<Tensor> out;
    add_products(scratch, x, projections, products, out);
    backend.linear(x, products);
    return out;
}

std::vector<Tensor> project_q_and(Backend& backend, const AttnInput& in,
                                  std::initializer_list<Projection> others) {
    std::vector<Product> products;
    std::vector<Tensor> out;
    add_products(in.scratch, in.x, {{in.weights.q, in.weights.q_bias}}, products, out);
    add_products(in.scratch, in.x, others, products, out);
    backend.linear(in.x, products);
    if (in.weights.q_norm)
        backend.norm(NormKind::rms, out[0], in.weights.q_norm, {}, *in.config.qk_norm_eps, out[0]);
    if (in.rope) backend.rope(out[0], in.config.n_heads, in.rope, in.batch.positions);
    return out;
}

AttentionArgs attention_args(const AttnInput& in, std::span<const AttentionSequence> sequences,
                             std::span<const ScoreTerm> scores, std::span<const ValueTerm> values) {
    const AttnConfig& c = in.config;
    return {.sequences = sequences,
            .scores = scores,
            .values = values,
            .n_heads = c.n_heads,
            .scale = c.scale,
            .window = c.window,
            .relative_bias = in.weights.relative_bias,
            .relative_origin = in.weights.relative_bias.cols - 1,
            .sparse_threshold = c.sparse_threshold};
}

Tensor as_stored(Backend& backend, Scratch& scratch, Tensor x, const Plane& plane) {
    if (plane.type == DType::F32) return x;
    const Tensor out = scratch.f32(x.rows, x.cols);
    backend.round(x, plane.type, plane.heads, out);
    return out;
}

std::vector<float> values_of(Backend& backend, Tensor vector) {
    std::vector<float> values(vector.cols);
    backend.download(values.data(), vector, values.size() * sizeof(float));  // may be a part of a row
    return values;
}

Tensor derived_vector(Backend& backend, AttnWeights& w, const std::vector<float>& values, const char* what) {
    const size_t bytes = values.size() * sizeof(float);
    w.owned.push_back(backend.alloc(MemoryKind::derived, bytes, what));
    const Tensor out(w.owned.back().data.get(), DType::F32, 1, int64_t(values.size()));
    backend.upload(out, values.data(), bytes);
    return out;
}

void linear_heads(Backend& backend, const AttnConfig& c, Tensor x, Tensor weight, Tensor out) {
    if (c.mha()) return backend.linear_per_head(x, weight, c.n_heads, out);
    const int group = c.n_heads / c.n_kv_heads;
    const int64_t m = weight.rows / c.n_kv_heads;
    for (int h = 0; h < c.n_heads; ++h)
        backend.linear(x.cols_of(h * weight.cols, weight.cols), weight.rows_of(h / group * m, m), {},
                       out.cols_of(h * m, m));
}

void load_row_scale(Backend& backend, const AttnConfig& c, DerivedWeights& derived, const char* suffix,
                    int64_t width, AttnWeights& w) {
    w.row_scale = derived.folded_if_any(c.layer, suffix, 1, width, head_bytes(c.type_k, 1).scales > 0);
    if (!w.row_scale) return;
    std::vector<float> shrink = values_of(backend, w.row_scale);
    for (float& s : shrink) {
        if (!backend.dry() && !(s > 0 && std::isfinite(s)))
            fail(ErrorCode::format, "tensor 'blk.", c.layer, ".", suffix, "' holds ", s,
                 ": the scales of a row must be positive numbers");
        s = 1 / s;
    }
    w.row_shrink = derived_vector(backend, w, shrink, "scales of a row");
}

std::vector<float> for_query_heads(const AttnConfig& c, const std::vector<float>& v) {
    const int group = c.n_heads / c.n_kv_heads, dim = c.head_dim;
    std::vector<float> out(c.q_width());
    for (int i = 0; i < c.q_width(); ++i) out[i] = v[i / dim / group * dim + i % dim];
    return out;
}

namespace {

/// Rows [first, first + n) of a weight of any type, unpacked.
void unpack_rows(Backend& backend, Tensor weight, int64_t first, int64_t n, Tensor ids, Tensor out) {
    std::vector<int32_t> host(n);
    for (int64_t i = 0; i < n; ++i) host[i] = int32_t(first + i);
    ids.cols = n;
    backend.upload(ids, host.data(), n * sizeof(int32_t));
    backend.gather(weight, ids, out);
}

}  // namespace

void fold_v_bias(Backend& backend, const AttnConfig& c, AttnWeights& w) {
    if (!w.v_bias) return;
    const std::vector<float> expanded = for_query_heads(c, values_of(backend, w.v_bias));

    constexpr int64_t kRows = 64;
    const Buffer temporary = backend.alloc(
        MemoryKind::scratch, (c.q_width() * (kRows + 1) + kRows) * sizeof(float), "folding of the V bias");
    const Tensor bias(temporary.data.get(), DType::F32, 1, c.q_width());
    const Tensor rows(bias.row(1), DType::F32, kRows, c.q_width());
    const Tensor ids(rows.row(kRows), DType::I32, 1, kRows);
    backend.upload(bias, expanded.data(), bias.bytes());

    const Buffer folded = backend.alloc(MemoryKind::derived, c.d_model * sizeof(float), "output bias");
    const Tensor out(folded.data.get(), DType::F32, 1, c.d_model);
    for (int64_t first = 0; first < c.d_model; first += kRows) {
        const int64_t n = std::min<int64_t>(kRows, c.d_model - first);
        unpack_rows(backend, w.o, first, n, ids, rows.rows_of(0, n));
        backend.linear(bias, rows.rows_of(0, n), {}, out.cols_of(first, n));
    }
    if (w.o_bias) backend.add(out, w.o_bias);
    w.o_bias = out;
    w.v_bias = {};
    w.owned.push_back(folded);
}

void absorb_q(Backend& backend, const AttnConfig& c, Tensor weight, AttnWeights& w, int left_out) {
    const int64_t width = weight.cols, dim = c.head_dim, group = c.n_heads / c.n_kv_heads;
    const Buffer temporary =
        backend.alloc(MemoryKind::scratch, dim * (width + 1) * sizeof(float), "transposition of a weight");
    const Tensor head(temporary.data.get(), DType::F32, dim, width);
    const Tensor ids(head.row(dim), DType::I32, 1, dim);

    const Buffer owned =
        backend.alloc(MemoryKind::derived, c.n_heads * width * dim * sizeof(float), "absorbed query weight");
    w.absorbed_q = Tensor(owned.data.get(), DType::F32, c.n_heads * width, dim);
    w.owned.push_back(owned);
    if (backend.dry()) return;
    std::vector<float> from(dim * width), to(dim * width);
    for (int h = 0; h < c.n_heads; ++h) {
        unpack_rows(backend, weight, h / group * dim, dim, ids, head);
        backend.download(from.data(), head, head.bytes());
        for (int64_t i = left_out; i < dim; ++i)
            for (int64_t j = 0; j < width; ++j) to[j * dim + i] = from[i * width + j];
        backend.upload(w.absorbed_q.rows_of(h * width, width), to.data(), to.size() * sizeof(float));
    }
}

std::vector<Part> split_by_branch(const AttnInput& in) {
    const AttnConfig& c = in.config;
    std::vector<Part> parts;
    for (AttentionSequence s : in.group.sequences) {
        const bool absorb = s.end > s.begin && s.n_queries <= c.head_dim && !in.batch.chunk;
        const bool joins =
            absorb && !parts.empty() && parts.back().absorb && parts.back().n + s.n_queries <= c.head_dim;
        if (!joins) parts.push_back({absorb, s.query, 0, {}});
        Part& part = parts.back();
        s.query -= part.first;
        part.n += s.n_queries;
        part.sequences.push_back(s);
    }
    return parts;
}

void each_part(const AttnInput& in, const Branch& absorbed, const Branch& materialised) {
    for (const Part& part : split_by_branch(in)) {
        const Scratch::Scope scope(in.scratch);
        (part.absorb ? absorbed : materialised)(part);
    }
}

Tensor positions_from(Backend& backend, Scratch& scratch, int64_t first, int64_t n) {
    std::vector<int32_t> host(n);
    for (int64_t i = 0; i < n; ++i) host[i] = int32_t(first + i);
    const Tensor positions = scratch.i32(n);
    backend.upload(positions, host.data(), n * sizeof(int32_t));
    return positions;
}

Rows dense_rows(Tensor t, int64_t first) {
    return {.base = t.data, .dtype = t.dtype, .width = int(t.cols), .row_bytes = t.stride, .first = first};
}

DType dense_type(DType stored) { return stored == DType::F32 || stored == DType::BF16 ? stored : DType::F16; }

namespace {

void store_dense(Backend& backend, const AttnInput& in, int64_t first, const std::vector<Tensor>& rows) {
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

void materialise_before(Backend& backend, const AttnInput& in, const Part& part, const Materialise& make) {
    constexpr int64_t kSegment = 512;
    const AttentionSequence& s = part.sequences[0];
    DenseRows& dense = in.dense;
    if (dense.table != s.table) {
        const int64_t window = in.config.window;
        dense.table = s.table;
        dense.end = window ? std::max(s.begin, s.position - window + 1) : s.begin;
    }
    for (; dense.end < s.end; dense.end = std::min(dense.end + kSegment, s.end)) {
        const Scratch::Scope scope(in.scratch);
        const int64_t end = std::min(dense.end + kSegment, s.end);
        std::vector<Tensor> rows;
        for (const Tensor& plane : dense.planes) rows.push_back(in.scratch.f32(end - dense.end, plane.cols));
        make(dense.end, end, rows);
        store_dense(backend, in, dense.end, rows);
    }
}

void keep_dense(Backend& backend, const AttnInput& in, const Part& part, const std::vector<Tensor>& fresh) {
    if (!in.batch.chunk) return;
    store_dense(backend, in, part.sequences[0].position, fresh);
    in.dense.end = part.sequences[0].position + part.n;
}

}  // namespace slimrt
