// Mode k (slim attention, Graef and Wasielewski): K alone, before RoPE and without bias.
//   V = K W_KV, W_KV = W_K^-1 W_V (square) or W_K^T (W_K W_K^T)^-1 W_V (wide), folded offline.
//   head_i = p_i (K W_KV,i) materialised = (p_i K) W_KV,i absorbed.
// Mode k+r (conditioned slim attention, our own): a row also holds what is left of V, in few columns. It is
// computed from k^, the row as it will be read back, so that the rounding of k is corrected with the rest.
//   k^ = round(x W_K / s), r = x P + k^ R;   V = k^ W_KV + r^ B, K = k^ s
// Where keys are normed (QK-norm), k stays as it is and 1 / rms(k) stands beside it, for the scores.
#include "cache/modes/modes.h"
#include "core/error.h"

namespace slimrt {
namespace {

/// The product of two vectors, element by element.
Tensor product_of(Backend& backend, AttnWeights& w, Tensor a, Tensor b) {
    std::vector<float> values = values_of(backend, a);
    const std::vector<float> others = values_of(backend, b);
    for (size_t i = 0; i < values.size(); ++i) values[i] *= others[i];
    return derived_vector(backend, w, values, "scales of a normed row");
}

/// What a step's tokens leave behind, and how values read it: k as it is stored, the residual too.
struct Written {
    Tensor q, k, inverse_rms, known_k, residual, known_residual;

    Written of(const Part& part) const {
        return {part.of(q),       part.of(k),        part.of(inverse_rms),
                part.of(known_k), part.of(residual), part.of(known_residual)};
    }
    FreshRows rows() const {
        FreshRows planes = {k};
        if (residual) planes.push_back(residual);
        if (inverse_rms) planes.push_back(inverse_rms);
        return planes;
    }
};

Format with_norm(Format planes, const AttnConfig& c) {
    if (c.qk_norm_eps) planes.push_back({"n", 1, 1, DType::F32});
    return planes;
}

class K : public CacheMode {
  public:
    const char* name() const override { return "k"; }

    std::string refusal(const AttnConfig& c) const override {
        if (c.kv_width() >= c.d_model) return "";
        return concat("K is ", c.kv_width(), " wide (", c.n_kv_heads, " KV heads, ", c.n_heads,
                      " query heads) and the layer's input ", c.d_model,
                      ", so V cannot be computed from K; K-only needs multi-head attention");
    }

    Format format(const AttnConfig& c) const override {
        return with_norm({whole_plane("k", c.kv_width(), c.n_kv_heads, c.type_k)}, c);
    }

    Format materialised(const AttnConfig& c) const override {
        return {{"v", c.kv_width(), 1, dense_type(c.type_k)}};
    }

    void prepare(Backend& backend, const AttnConfig& c, DerivedWeights& derived,
                 AttnWeights& w) const override {
        w.w_kv = derived.folded(c.layer, "attn_kv.weight", c.kv_width(), c.kv_width());
        w.row_scale = w.k_norm;
        fold_biases(backend, c, w);
    }

    FreshRows attend(Backend& backend, const AttnInput& in, Tensor out) const override {
        const Written step = write(backend, in);
        each_part(
            in, [&](const Part& p) { absorbed(backend, in, p, step.of(p), p.of(out)); },
            [&](const Part& p) { materialised_v(backend, in, p, step.of(p), p.of(out)); });
        return step.rows();
    }

  protected:
    static void fold_biases(Backend& backend, const AttnConfig& c, AttnWeights& w) {
        fold_v_bias(backend, c, w);
        if (!c.rope) w.k_bias = {};  // without RoPE it shifts all scores of a query alike
    }

    /// The step's own values are read from k in full precision.
    virtual Written write(Backend& backend, const AttnInput& in) const {
        const auto qk = project_q_and(backend, in, {{in.weights.k, {}}});
        return {.q = qk[0], .k = qk[1], .inverse_rms = inverse_rms(backend, in, qk[1]), .known_k = qk[1]};
    }

    /// Of k for its norm, or none.
    static Tensor inverse_rms(Backend& backend, const AttnInput& in, Tensor k) {
        if (!in.config.qk_norm_eps) return {};
        const Tensor out = in.scratch.f32(k.rows, 1);
        backend.inverse_rms(k, *in.config.qk_norm_eps, out);
        return out;
    }

  private:
    /// Scores of q with k, scaled, normed and rotated on read.
    static ScoreTerm score_term(const AttnInput& in, const Written& own) {
        return {.stored = in.rows[0],
                .fresh = own.k,
                .n_heads = in.config.n_kv_heads,
                .dim = in.config.head_dim,
                .q = own.q,
                .row_scale = in.weights.row_scale,
                .factors = own.inverse_rms ? in.rows.back() : Rows{},
                .fresh_factors = own.inverse_rms,
                .bias = in.weights.k_bias,
                .rope = in.rope};
    }

    static void absorbed(Backend& backend, const AttnInput& in, const Part& part, const Written& own,
                         Tensor out) {
        const AttnConfig& c = in.config;
        const AttnWeights& w = in.weights;
        const Tensor u =
            in.scratch.f32(part.n, int64_t(c.n_heads) * c.kv_width());  // p_i K, float32 into W_KV
        const ScoreTerm scores[] = {score_term(in, own)};
        std::vector<ValueTerm> values = {{in.rows[0], own.known_k, 1, c.kv_width(), u}};
        if (own.residual) {
            const Tensor u_r = in.scratch.f32(part.n, int64_t(c.n_heads) * c.rank);
            values.push_back({in.rows[1], own.known_residual, 1, c.rank, u_r});
        }
        backend.attention(attention_args(in, part.sequences, scores, values));
        linear_heads(backend, c, u, w.w_kv, out);
        if (w.out_scale) backend.multiply(out, w.out_scale);
        if (!own.residual) return;
        const Tensor rest = in.scratch.f32(out.rows, out.cols);
        linear_heads(backend, c, values[1].out, w.residual_v, rest);
        backend.add(out, rest);
    }

    static void materialised_v(Backend& backend, const AttnInput& in, const Part& part, const Written& own,
                               Tensor out) {
        const AttnConfig& c = in.config;
        const Tensor v = project(backend, in.scratch, part.of(in.x), {{in.weights.v, {}}})[0];
        materialise_before(backend, in, part, [&](int64_t begin, int64_t end, const auto& planes) {
            read_v(backend, in, part.sequences[0].table, begin, end, planes[0]);
        });
        const ScoreTerm scores[] = {score_term(in, own)};
        const ValueTerm values[] = {{dense_rows(in.dense.planes[0], 0), v, c.n_kv_heads, c.head_dim, out}};
        backend.attention(attention_args(in, part.sequences, scores, values));
        keep_dense(backend, in, part, {v});
    }

    /// V of the stored rows [begin, end).
    static void read_v(Backend& backend, const AttnInput& in, const int32_t* table, int64_t begin,
                       int64_t end, Tensor v) {
        const AttnWeights& w = in.weights;
        const Tensor k = in.scratch.f32(end - begin, in.config.kv_width());
        backend.load(in.rows[0], table, begin, end, k);
        backend.linear(k, w.w_kv, {}, v);
        if (w.v_scale) backend.multiply(v, w.v_scale);
        if (!w.residual_v) return;
        const Tensor residual = in.scratch.f32(end - begin, in.config.rank);
        backend.load(in.rows[1], table, begin, end, residual);
        backend.add(v, project(backend, in.scratch, residual, {{w.residual_v, {}}})[0]);
    }
};

class KResidual final : public K {
  public:
    const char* name() const override { return "k+r"; }
    bool has_residual() const override { return true; }
    std::string refusal(const AttnConfig&) const override { return ""; }

    /// Static scales even out the channels: one scale a row is enough for the types that have one.
    Format format(const AttnConfig& c) const override {
        Format planes = {{"k", c.kv_width(), c.type_k == DType::Q4 ? c.n_kv_heads : 1, c.type_k}};
        if (c.rank > 0) planes.push_back({"r", c.rank, 1, c.type_r});
        return with_norm(planes, c);
    }

    void prepare(Backend& backend, const AttnConfig& c, DerivedWeights& derived,
                 AttnWeights& w) const override {
        const int wide = c.kv_width();
        w.w_kv = derived.folded(c.layer, "attn_kr_v.weight", wide, wide);
        w.v_scale = derived.folded_if_any(c.layer, "attn_kr_v.scale", 1, wide, false);
        if (w.v_scale)
            w.out_scale = derived_vector(backend, w, for_query_heads(c, values_of(backend, w.v_scale)),
                                         "scales of W_KV");
        load_row_scale(backend, c, derived, "attn_kr_row.scale", wide, w);
        if (w.k_norm) w.row_scale = w.row_scale ? product_of(backend, w, w.row_scale, w.k_norm) : w.k_norm;
        if (c.rank > 0) {
            w.residual_x = derived.folded(c.layer, "attn_kr_x.weight", c.rank, c.d_model);
            w.residual_k = derived.folded(c.layer, "attn_kr_k.weight", c.rank, wide);
            w.residual_v = derived.folded(c.layer, "attn_kr_out.weight", wide, c.rank);
        }
        fold_biases(backend, c, w);
    }

  protected:
    /// The step's own values are read as later steps will read them.
    Written write(Backend& backend, const AttnInput& in) const override {
        const AttnWeights& w = in.weights;
        const Format planes = format(in.config);
        const bool residual = in.config.rank > 0;
        const auto projected = residual ? project_q_and(backend, in, {{w.k, {}}, {w.residual_x, {}}})
                                        : project_q_and(backend, in, {{w.k, {}}});
        Written step{.q = projected[0], .k = projected[1]};
        step.inverse_rms = inverse_rms(backend, in, step.k);
        if (w.row_shrink) backend.multiply(step.k, w.row_shrink);
        step.known_k = as_stored(backend, in.scratch, step.k, planes[0]);
        if (!residual) return step;
        step.residual = projected[2];
        const Tensor correction = project(backend, in.scratch, step.known_k, {{w.residual_k, {}}})[0];
        backend.add(step.residual, correction);
        step.known_residual = as_stored(backend, in.scratch, step.residual, planes[1]);
        return step;
    }
};

}  // namespace

const CacheMode* k_mode() {
    static const K mode;
    return &mode;
}

const CacheMode* kr_mode() {
    static const KResidual mode;
    return &mode;
}

}  // namespace slimrt
