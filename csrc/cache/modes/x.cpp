// Mode x: the layer's normed input, for models without RoPE; any number of KV heads, no inverse anywhere.
//   scores_i = (q_i W_K,i^T) X^T, head_i = (p_i X) W_V,i: both absorbed over the whole row.
#include "cache/modes/modes.h"

namespace slimrt {
namespace {

class X final : public CacheMode {
  public:
    const char* name() const override { return "x"; }

    std::string refusal(const AttnConfig& c) const override {
        if (c.qk_norm_eps) return "keys are normed (QK-norm), so scores cannot be read from the input";
        return c.rope ? "keys are rotated by position (RoPE), so scores cannot be read from the input" : "";
    }

    Format format(const AttnConfig& c) const override {
        return {whole_plane("x", c.d_model, c.d_model % c.n_heads == 0 ? c.n_heads : 1, c.type_k)};
    }

    Format materialised(const AttnConfig& c) const override {
        return {{"k", c.kv_width(), 1, dense_type(c.type_k)}, {"v", c.kv_width(), 1, dense_type(c.type_k)}};
    }

    void prepare(Backend& backend, const AttnConfig& c, DerivedWeights&, AttnWeights& w) const override {
        absorb_q(backend, c, w.k, w);
        fold_v_bias(backend, c, w);
        w.k_bias = {};  // shifts all scores of a query alike
    }

    FreshRows attend(Backend& backend, const AttnInput& in, Tensor out) const override {
        const Tensor q = project_q_and(backend, in, {})[0];
        each_part(
            in, [&](const Part& p) { absorbed(backend, in, p, p.of(q), p.of(in.x), p.of(out)); },
            [&](const Part& p) { materialised_kv(backend, in, p, p.of(q), p.of(in.x), p.of(out)); });
        return {in.x};
    }

  private:
    static void absorbed(Backend& backend, const AttnInput& in, const Part& part, Tensor q, Tensor x,
                         Tensor out) {
        const AttnConfig& c = in.config;
        const int64_t wide = int64_t(c.n_heads) * c.d_model;
        const Tensor wide_q = in.scratch.f32(part.n, wide), u = in.scratch.f32(part.n, wide);
        backend.linear_per_head(q, in.weights.absorbed_q, c.n_heads, wide_q);
        const ScoreTerm scores[] = {{in.rows[0], x, 1, c.d_model, wide_q}};
        const ValueTerm values[] = {{in.rows[0], x, 1, c.d_model, u}};
        backend.attention(attention_args(in, part.sequences, scores, values));
        linear_heads(backend, c, u, in.weights.v, out);
    }

    static void materialised_kv(Backend& backend, const AttnInput& in, const Part& part, Tensor q, Tensor x,
                                Tensor out) {
        const AttnConfig& c = in.config;
        const AttnWeights& w = in.weights;
        const auto kv = project(backend, in.scratch, x, {{w.k, {}}, {w.v, {}}});
        const Tensor k = kv[0], v = kv[1];
        materialise_before(backend, in, part, [&](int64_t begin, int64_t end, const auto& planes) {
            const Tensor rows = in.scratch.f32(end - begin, c.d_model);
            backend.load(in.rows[0], part.sequences[0].table, begin, end, rows);
            const Product products[] = {{w.k, {}, planes[0]}, {w.v, {}, planes[1]}};
            backend.linear(rows, products);
        });
        const ScoreTerm scores[] = {{dense_rows(in.dense.planes[0], 0), k, c.n_kv_heads, c.head_dim, q}};
        const ValueTerm values[] = {{dense_rows(in.dense.planes[1], 0), v, c.n_kv_heads, c.head_dim, out}};
        backend.attention(attention_args(in, part.sequences, scores, values));
        keep_dense(backend, in, part, kv);
    }
};

}  // namespace

const CacheMode* x_mode() {
    static const X mode;
    return &mode;
}

}  // namespace slimrt
