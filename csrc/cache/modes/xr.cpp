// Mode xr: the layer's input in a basis of its own, for models that rotate a part of each head.
//   row = x A / s, A = [W_K,rot | T]: the rotated columns of K, then the rest of x (T: an orthonormal basis
//   of what W_K,rot does not span). A is far better conditioned than W_K, since W_K,rot is tall.
// Scores of rotated columns are read from them; those of the others, and values, are absorbed over the row:
//   scores_i = q_i,rot rotate(row_i,rot s)^T + (q_i,rest W_k,i^T) row^T,   head_i = (p_i row) W_v,i
// with k = row W_k, v = row W_v, both folded offline.
#include "cache/modes/modes.h"
#include "core/error.h"

namespace slimrt {
namespace {

class Xr final : public CacheMode {
  public:
    const char* name() const override { return "xr"; }

    std::string refusal(const AttnConfig& c) const override {
        if (c.qk_norm_eps) return "keys are normed (QK-norm), so scores cannot be read from the input";
        if (!c.rope) return "no column of K is rotated (no RoPE): mode x stores the input as it is";
        if (c.n_rot == c.head_dim) return "all columns of K are rotated: mode k or k+r stores them";
        if (rotated(c) <= c.d_model) return "";
        return concat("the rotated columns of K are ", rotated(c), " and the layer's input is ", c.d_model,
                      " wide, so they determine more than a row holds");
    }

    /// Static scales even out the channels: one scale a row is enough for the types that have one.
    Format format(const AttnConfig& c) const override { return {{"x", c.d_model, 1, c.type_k}}; }

    Format materialised(const AttnConfig& c) const override {
        return {{"k", c.kv_width(), 1, dense_type(c.type_k)}, {"v", c.kv_width(), 1, dense_type(c.type_k)}};
    }

    void prepare(Backend& backend, const AttnConfig& c, DerivedWeights& derived,
                 AttnWeights& w) const override {
        w.row_in = derived.folded(c.layer, "attn_xr_in.weight", c.d_model, c.d_model);
        w.row_k = derived.folded(c.layer, "attn_xr_k.weight", c.kv_width(), c.d_model);
        w.row_v = derived.folded(c.layer, "attn_xr_v.weight", c.kv_width(), c.d_model);
        load_row_scale(backend, c, derived, "attn_xr_row.scale", c.d_model, w);
        absorb_q(backend, c, w.row_k, w, c.n_rot);
        fold_v_bias(backend, c, w);
        if (w.k_bias)  // that of the others shifts all scores of a query alike
            w.rotated_bias = derived_vector(backend, w, rotated_of(c, values_of(backend, w.k_bias)),
                                            "bias of the rotated columns");
    }

    FreshRows attend(Backend& backend, const AttnInput& in, Tensor out) const override {
        const auto projected = project_q_and(backend, in, {{in.weights.row_in, {}}});
        const Tensor q = projected[0], row = projected[1];
        each_part(
            in, [&](const Part& p) { absorbed(backend, in, p, p.of(q), p.of(row), p.of(out)); },
            [&](const Part& p) { materialised_kv(backend, in, p, p.of(q), p.of(out)); });
        return {row};
    }

  private:
    static int rotated(const AttnConfig& c) { return c.n_kv_heads * c.n_rot; }

    /// Of each head the first n_rot.
    static std::vector<float> rotated_of(const AttnConfig& c, const std::vector<float>& k) {
        std::vector<float> out(rotated(c));
        for (int i = 0; i < rotated(c); ++i) out[i] = k[i / c.n_rot * c.head_dim + i % c.n_rot];
        return out;
    }

    static void absorbed(Backend& backend, const AttnInput& in, const Part& part, Tensor q, Tensor row,
                         Tensor out) {
        const AttnConfig& c = in.config;
        const AttnWeights& w = in.weights;
        const int64_t wide = int64_t(c.n_heads) * c.d_model;
        const Tensor wide_q = in.scratch.f32(part.n, wide), u = in.scratch.f32(part.n, wide);
        backend.linear_per_head(q, w.absorbed_q, c.n_heads, wide_q);
        const ScoreTerm scores[] = {
            {.stored = in.rows[0],
             .fresh = row,
             .n_heads = c.n_kv_heads,
             .dim = c.n_rot,
             .q = q,
             .row_scale = w.row_scale ? w.row_scale.cols_of(0, rotated(c)) : Tensor{},
             .bias = w.rotated_bias,
             .rope = in.rope},
            {.stored = in.rows[0], .fresh = row, .n_heads = 1, .dim = c.d_model, .q = wide_q}};
        const ValueTerm values[] = {{in.rows[0], row, 1, c.d_model, u}};
        backend.attention(attention_args(in, part.sequences, scores, values));
        linear_heads(backend, c, u, w.row_v, out);
    }

    /// Dense rows of K are biased and rotated, so that they are read as they are.
    static void materialised_kv(Backend& backend, const AttnInput& in, const Part& part, Tensor q,
                                Tensor out) {
        const AttnConfig& c = in.config;
        const AttnWeights& w = in.weights;
        const auto kv = project(backend, in.scratch, part.of(in.x), {{w.k, w.k_bias}, {w.v, {}}});
        const Tensor k = kv[0], v = kv[1];
        backend.rope(k, c.n_kv_heads, in.rope, in.batch.positions.cols_of(part.first, part.n));
        materialise_before(backend, in, part, [&](int64_t begin, int64_t end, const auto& planes) {
            const Tensor rows = in.scratch.f32(end - begin, c.d_model);
            backend.load(in.rows[0], part.sequences[0].table, begin, end, rows);
            const Product products[] = {{w.row_k, w.k_bias, planes[0]}, {w.row_v, {}, planes[1]}};
            backend.linear(rows, products);
            const Tensor positions = positions_from(backend, in.scratch, begin, end - begin);
            backend.rope(planes[0], c.n_kv_heads, in.rope, positions);
        });
        const ScoreTerm scores[] = {{dense_rows(in.dense.planes[0], 0), k, c.n_kv_heads, c.head_dim, q}};
        const ValueTerm values[] = {{dense_rows(in.dense.planes[1], 0), v, c.n_kv_heads, c.head_dim, out}};
        backend.attention(attention_args(in, part.sequences, scores, values));
        keep_dense(backend, in, part, kv);
    }
};

}  // namespace

const CacheMode* xr_mode() {
    static const Xr mode;
    return &mode;
}

}  // namespace slimrt
