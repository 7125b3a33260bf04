// Mode k (slim attention, Graef and Wasielewski): K alone, before RoPE and without bias.
//   V = K W_KV, W_KV = W_K^-1 W_V (square) or W_K^T (W_K W_K^T)^-1 W_V (wide), folded offline.
//   head_i = p_i (K W_KV,i) materialised = (p_i K) W_KV,i absorbed.
#include "cache/modes/modes.h"
#include "core/error.h"

namespace slimrt {
namespace {

class K final : public CacheMode {
  public:
    const char* name() const override { return "k"; }

    std::string refusal(const AttnConfig& c) const override {
        if (c.qk_norm_eps)
            return "keys are normed over the whole row (QK-norm), which this mode does not undo";
        if (c.kv_width() >= c.d_model) return "";
        return concat("K is ", c.kv_width(), " wide (", c.n_kv_heads, " KV heads, ", c.n_heads,
                      " query heads) and the layer's input ", c.d_model,
                      ", so V cannot be computed from K; K-only needs multi-head attention");
    }

    Format format(const AttnConfig& c) const override {
        return {whole_plane("k", c.kv_width(), c.n_kv_heads, c.type_k)};
    }

    Format materialised(const AttnConfig& c) const override {
        return {{"v", c.kv_width(), 1, dense_type(c.type_k)}};
    }

    void prepare(Backend& backend, const AttnConfig& c, DerivedWeights& derived,
                 AttnWeights& w) const override {
        w.w_kv = derived.folded(c.layer, "attn_kv.weight", c.kv_width(), c.kv_width());
        fold_v_bias(backend, c, w);
        if (!c.rope) w.k_bias = {};  // without RoPE it shifts all scores of a query alike
    }

    FreshRows attend(Backend& backend, const AttnInput& in, Tensor out) const override {
        const auto qk = project_q_and(backend, in, {{in.weights.k, {}}});
        const Tensor q = qk[0], k = qk[1];
        for (const Part& part : split_by_branch(in.config, in.batch)) {
            const Scratch::Scope scope(in.scratch);
            const auto branch = part.absorb ? absorbed : materialised_v;
            branch(backend, in, part, part.of(q), part.of(k), part.of(out));
        }
        return {k};
    }

  private:
    /// Scores of q with k, rotated on read.
    static ScoreTerm score_term(const AttnInput& in, Tensor q, Tensor k) {
        return {in.rows[0], k, in.config.n_kv_heads, in.config.head_dim, q, in.weights.k_bias, in.rope};
    }

    static void absorbed(Backend& backend, const AttnInput& in, const Part& part, Tensor q, Tensor k,
                         Tensor out) {
        const AttnConfig& c = in.config;
        const Tensor u =
            in.scratch.f32(part.n, int64_t(c.n_heads) * c.kv_width());  // p_i K, float32 into W_KV
        const ScoreTerm score = score_term(in, q, k);
        const ValueTerm value{in.rows[0], k, 1, c.kv_width(), u};
        backend.attention(attention_args(c, part.sequences, score, value));
        linear_heads(backend, c, u, in.weights.w_kv, out);
    }

    static void materialised_v(Backend& backend, const AttnInput& in, const Part& part, Tensor q, Tensor k,
                               Tensor out) {
        const AttnConfig& c = in.config;
        const Tensor v = project(backend, in.scratch, part.of(in.x), in.weights.v, {});
        materialise_before(backend, in, part, [&](int64_t begin, int64_t end, const auto& planes) {
            const Tensor rows = in.scratch.f32(end - begin, c.kv_width());
            backend.load(in.rows[0], part.sequences[0].table, begin, end, rows);
            backend.linear(rows, in.weights.w_kv, {}, planes[0]);
        });
        const ScoreTerm score = score_term(in, q, k);
        const ValueTerm value{dense_rows(in.dense.planes[0], 0), v, c.n_kv_heads, c.head_dim, out};
        backend.attention(attention_args(c, part.sequences, score, value));
        keep_dense(backend, in, part, {v});
    }
};

}  // namespace

const CacheMode* k_mode() {
    static const K mode;
    return &mode;
}

}  // namespace slimrt
