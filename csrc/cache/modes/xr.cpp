// Mode xr: the layer's input in another basis, for models that rotate a part of each head (partial RoPE).
//   row = x A / s, A = [W_K,rot | T]: the rotated columns of K, then the rest of x (T: an orthonormal basis
//   of what W_K,rot does not span). A is far better conditioned than W_K, since W_K,rot is tall.
// Scores of rotated columns are read from these; other scores, and values, are absorbed over whole rows:
//   scores_i = q_i,rot rotate(row_i,rot s)^T + (q_i,rest W_k,i^T) row^T,   head_i = (p_i row) W_v,i
// with k = row W_k, v = row W_v, both folded offline.
#include "cache/attend.h"
#include "cache/modes/modes.h"
#include "cache/prepare.h"
#include "core/error.h"

namespace slimrt {
namespace {

constexpr const char *kIn = "attn_xr_in.weight", *kK = "attn_xr_k.weight", *kV = "attn_xr_v.weight",
                     *kScale = "attn_xr_row.scale";

struct PreparedXr : Prepared {
    using Prepared::Prepared;
    Tensor row_in, row_k, row_v;   // row = linear(x, .) / s, k and v = linear(row, .)
    Tensor absorbed_q;             // for each head: q -> query against whole rows
    Tensor rotated_bias;           // of K's rotated columns
    Tensor row_scale, row_shrink;  // [1, d_model]: static scales of channels, and 1 / scales; or none

    uint64_t fingerprint(Backend& backend) const override {
        return fingerprint_of(backend, {row_shrink, row_in});
    }
};

const PreparedXr& prepared(const AttnInput& in) { return static_cast<const PreparedXr&>(in.prepared); }

class Xr final : public AbsorbingMode {
  public:
    const char* name() const override { return "xr"; }

    std::string refusal(const AttnConfig& c) const override {
        if (c.qk_norm_eps) return "keys are normed (QK-norm), so scores cannot be read from the input";
        if (!c.rope) return "no column of K is rotated (no RoPE): mode x stores the input as it is";
        if (c.n_rot == c.head_dim) return "all columns of K are rotated: mode k or k+r stores them";
        if (rotated(c) <= c.d_model) return capped_without_bias(c);
        return concat("the rotated columns of K are ", rotated(c), " and the layer's input is ", c.d_model,
                      " wide, so they determine more than a row holds");
    }

    bool has_values_of_all() const override { return true; }

    /// Static scales make channels alike: one scale a row is enough for types with scales.
    Format format(const AttnConfig& c) const override { return {{"x", c.d_model, 1, c.type_k}}; }

    Format dense_format(const AttnConfig& c) const override {
        return {{"k", c.kv_width(), 1, dense_type(c.type_k)}, {"v", c.kv_width(), 1, dense_type(c.type_k)}};
    }

    std::vector<Fold> folds(const AttnConfig& c) const override {
        const DType type = c.type_k == DType::F32 ? DType::F32 : DType::F16;  // as conversions choose
        return {{.suffix = kIn, .rows = c.d_model, .cols = c.d_model, .type = type},
                {.suffix = kK, .rows = c.kv_width(), .cols = c.d_model, .type = type},
                {.suffix = kV, .rows = c.kv_width(), .cols = c.d_model, .type = type},
                row_scale_fold(c, kScale, c.d_model)};
    }
    std::vector<Unread> unread(const AttnConfig&) const override {
        return {{"attn_k.weight", true}, {"attn_v.weight", true}, {kK, true}};
    }

    std::unique_ptr<Prepared> prepare(Backend& backend, const PrepareInput& in) const override {
        const AttnConfig& c = in.config;
        auto p = std::make_unique<PreparedXr>(in.weights);
        p->row_in = in.folded.at(kIn);
        p->row_k = in.folded.at(kK);
        p->row_v = in.folded.at(kV);
        p->row_scale = in.folded.at(kScale);
        p->row_shrink = row_shrink(backend, c, kScale, p->row_scale, p->owned);
        p->absorbed_q = absorb_q(backend, c, p->row_k, p->owned, c.n_rot);
        // The other columns' bias shifts all scores of a query alike: the softmax does not change.
        if (const Tensor bias = in.weights.k_bias)
            p->rotated_bias = derived_vector(backend, rotated_of(c, values_of(backend, bias)),
                                             "bias of the rotated columns", p->owned);
        return p;
    }

    std::vector<Projection> projections(const Prepared& p) const override {
        return {{static_cast<const PreparedXr&>(p).row_in, {}}};
    }

  protected:
    Written write_rows(Backend&, const WriteInput& in) const override { return {.planes = in.projected}; }

    void absorbed(Backend& backend, const ReadInput& in, const Written& own, Tensor out) const override {
        const AttnConfig& c = in.config;
        const PreparedXr& p = prepared(in);
        const int64_t wide = int64_t(c.n_heads) * c.d_model;
        const Tensor wide_q = in.scratch.f32(in.q.rows, wide), u = in.scratch.f32(in.q.rows, wide);
        backend.linear_per_head(in.q, p.absorbed_q, c.n_heads, wide_q);
        const Tensor row = own.plane(0);
        const ScoreTerm scores[] = {
            {.stored = in.rows[0],
             .fresh = row,
             .n_heads = c.n_kv_heads,
             .dim = c.n_rot,
             .q = in.q,
             .row_scale = p.row_scale ? p.row_scale.cols_of(0, rotated(c)) : Tensor{},
             .bias = p.rotated_bias,
             .rope = in.rope},
            {.stored = in.rows[0], .fresh = row, .n_heads = 1, .dim = c.d_model, .q = wide_q}};
        const ValueTerm values[] = {{in.rows[0], row, 1, c.d_model, u}};
        backend.attention(attention_args(in, scores, values));
        backend.linear_per_head(u, p.row_v, c.n_heads, out);
    }

    /// Dense rows of K contain bias and RoPE, so that they are read as they are.
    std::vector<Tensor> dense_of(Backend& backend, const AttnInput& in, const Written& own) const override {
        const AttnWeights& w = in.prepared.model;
        const auto kv = project(backend, in.scratch, own.x, {{w.k, w.k_bias}, {w.v, {}}});
        backend.rope(kv[0], in.config.n_kv_heads, in.rope, in.positions);
        return kv;
    }

    void dense_of_stored(Backend& backend, const ReadInput& in, int64_t begin, int64_t end,
                         const std::vector<Tensor>& planes) const override {
        const PreparedXr& p = prepared(in);
        const Tensor rows = in.scratch.f32(end - begin, in.config.d_model);
        backend.load(in.rows[0], in.sequences[0].table, begin, end, rows);
        const Product products[] = {{p.row_k, p.model.k_bias, planes[0]}, {p.row_v, {}, planes[1]}};
        backend.linear(rows, products);
        const Tensor positions = positions_from(backend, in.scratch, begin, end - begin);
        backend.rope(planes[0], in.config.n_kv_heads, in.rope, positions);
    }

  private:
    static int rotated(const AttnConfig& c) { return c.n_kv_heads * c.n_rot; }

    /// The first n_rot columns of each head.
    static std::vector<float> rotated_of(const AttnConfig& c, const std::vector<float>& k) {
        std::vector<float> out(rotated(c));
        for (int i = 0; i < rotated(c); ++i) out[i] = k[i / c.n_rot * c.head_dim + i % c.n_rot];
        return out;
    }
};

}  // namespace

const CacheMode* xr_mode() {
    static const Xr mode;
    return &mode;
}

}  // namespace slimrt
