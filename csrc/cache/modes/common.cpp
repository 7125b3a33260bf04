// What the modes share: projections, bias folding, the absorbed and the materialised branch.
#include <algorithm>

#include "cache/modes/modes.h"

namespace slimrt {

Plane whole_plane(const char* name, int width, int heads, DType type) {
    return {name, width, head_bytes(type, width / heads).scales ? heads : 1, type};
}

Tensor project(Backend& backend, Scratch& scratch, Tensor x, Tensor weight, Tensor bias) {
    const Tensor out = scratch.f32(x.rows, weight.rows);
    backend.linear(x, weight, bias, out);
    return out;
}

std::vector<Tensor> project_q_and(Backend& backend, const AttnInput& in,
                                  std::initializer_list<Projection> others) {
    std::vector<Tensor> out{in.scratch.f32(in.x.rows, in.weights.q.rows)};
    std::vector<Product> products{{in.weights.q, in.weights.q_bias, out[0]}};
    for (const auto& [weight, bias] : others) {
        out.push_back(in.scratch.f32(in.x.rows, weight.rows));
        products.push_back({weight, bias, out.back()});
    }
    backend.linear(in.x, products);
    if (in.weights.q_norm)
        backend.norm(NormKind::rms, out[0], in.weights.q_norm, {}, *in.config.qk_norm_eps, out[0]);
    if (in.rope) backend.rope(out[0], in.config.n_heads, in.rope, in.batch.positions);
    return out;
}

AttentionArgs attention_args(const AttnConfig& c, std::span<const AttentionSequence> sequences,
                             const ScoreTerm& score, const ValueTerm& value) {
    return {.sequences = sequences,
            .scores = {&score, 1},
            .values = {&value, 1},
            .n_heads = c.n_heads,
            .scale = c.scale(),
            .window = c.window,
            .sparse_threshold = c.sparse_threshold};
}

void linear_heads(Backend& backend, const AttnConfig& c, Tensor x, Tensor weight, Tensor out) {
    if (c.mha()) return backend.linear_per_head(x, weight, c.n_heads, out);
    const int group = c.n_heads / c.n_kv_heads;
    const int64_t m = weight.rows / c.n_kv_heads;
    for (int h = 0; h < c.n_heads; ++h)
        backend.linear(x.cols_of(h * weight.cols, weight.cols), weight.rows_of(h / group * m, m), {},
                       out.cols_of(h * m, m));
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
    const int group = c.n_heads / c.n_kv_heads, dim = c.head_dim;
    std::vector<float> b_v(c.kv_width()), expanded(c.q_width());
    backend.download(b_v.data(), w.v_bias, b_v.size() * sizeof(float));
    for (int i = 0; i < c.q_width(); ++i) expanded[i] = b_v[i / dim / group * dim + i % dim];

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

void absorb_q(Backend& backend, const AttnConfig& c, Tensor weight, AttnWeights& w) {
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
        for (int64_t i = 0; i < dim; ++i)
            for (int64_t j = 0; j < width; ++j) to[j * dim + i] = from[i * width + j];
        backend.upload(w.absorbed_q.rows_of(h * width, width), to.data(), to.size() * sizeof(float));
    }
}

std::vector<Part> split_by_branch(const AttnConfig& c, const Batch& batch) {
    std::vector<Part> parts;
    for (AttentionSequence s : batch.sequences) {
        const bool absorb = s.end > s.begin && s.n_queries <= c.head_dim && !batch.chunk;
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
