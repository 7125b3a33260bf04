// Mode v: V alone, without bias, for models without RoPE. K = V W_VK, W_VK = W_V^-1 W_K, is absorbed into the
// query: scores_i = (q_i W_VK,i^T) V^T over the whole row. It amplifies rounding in the scores as k does in
// V.
#include "cache/modes/modes.h"
#include "core/error.h"

namespace slimrt {
namespace {

class V final : public CacheMode {
  public:
    const char* name() const override { return "v"; }

    std::string refusal(const AttnConfig& c) const override {
        if (c.qk_norm_eps) return "keys are normed over the whole row (QK-norm), which a V row does not know";
        if (c.rope) return "keys are rotated by position (RoPE), which a V row does not know";
        if (c.kv_width() >= c.d_model) return "";
        return concat("V is ", c.kv_width(), " wide and the layer's input ", c.d_model,
                      ", so K cannot be computed from V; V-only needs multi-head attention");
    }

    Format format(const AttnConfig& c) const override {
        return {whole_plane("v", c.kv_width(), c.n_kv_heads, c.type_v)};
    }

    Format materialised(const AttnConfig& c) const override {
        return {{"k", c.kv_width(), 1, dense_type(c.type_v)}};
    }

    void prepare(Backend& backend, const AttnConfig& c, DerivedWeights& derived,
                 AttnWeights& w) const override {
        w.w_vk = derived.folded(c.layer, "attn_vk.weight", c.kv_width(), c.kv_width());
        absorb_q(backend, c, w.w_vk, w);
        fold_v_bias(backend, c, w);
        w.k_bias = {};  // shifts all scores of a query alike
    }

    FreshRows attend(Backend& backend, const AttnInput& in, Tensor out) const override {
        const AttnWeights& w = in.weights;
        const auto qv = project_q_and(backend, in, {{w.v, {}}});
        const Tensor q = qv[0], v = qv[1];
        each_part(
            in, [&](const Part& p) { absorbed(backend, in, p, p.of(q), p.of(v), p.of(out)); },
            [&](const Part& p) { materialised_k(backend, in, p, p.of(q), p.of(v), p.of(out)); });
        return {v};
    }

  private:
    static void absorbed(Backend& backend, const AttnInput& in, const Part& part, Tensor q, Tensor v,
                         Tensor out) {
        const AttnConfig& c = in.config;
        const Tensor wide_q = in.scratch.f32(part.n, int64_t(c.n_heads) * c.kv_width());
        backend.linear_per_head(q, in.weights.absorbed_q, c.n_heads, wide_q);
        const ScoreTerm scores[] = {{in.rows[0], v, 1, c.kv_width(), wide_q}};
        const ValueTerm values[] = {{in.rows[0], v, c.n_kv_heads, c.head_dim, out}};
        backend.attention(attention_args(in, part.sequences, scores, values));
    }

    static void materialised_k(Backend& backend, const AttnInput& in, const Part& part, Tensor q, Tensor v,
                               Tensor out) {
        const AttnConfig& c = in.config;
        const Tensor k = project(backend, in.scratch, part.of(in.x), {{in.weights.k, {}}})[0];
        materialise_before(backend, in, part, [&](int64_t begin, int64_t end, const auto& planes) {
            const Tensor v_rows = in.scratch.f32(end - begin, c.kv_width());
            backend.load(in.rows[0], part.sequences[0].table, begin, end, v_rows);
            backend.linear(v_rows, in.weights.w_vk, {}, planes[0]);
        });
        const ScoreTerm scores[] = {{dense_rows(in.dense.planes[0], 0), k, c.n_kv_heads, c.head_dim, q}};
        const ValueTerm values[] = {{in.rows[0], v, c.n_kv_heads, c.head_dim, out}};
        backend.attention(attention_args(in, part.sequences, scores, values));
        keep_dense(backend, in, part, {k});
    }
};

}  // namespace

const CacheMode* v_mode() {
    static const V mode;
    return &mode;
}

}  // namespace slimrt
