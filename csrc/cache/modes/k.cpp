// Mode k (slim attention, Graef and Wasielewski): K alone, before RoPE and without bias.
//   V = K W_KV, W_KV = W_K^-1 W_V (square) or W_K^T (W_K W_K^T)^-1 W_V (wide), folded offline.
//   head_i = p_i (K W_KV,i) materialised = (p_i K) W_KV,i absorbed.
// Mode k+r (conditioned slim attention, our own): a row also holds what is left of V, in few columns. It is
// computed from k^, the row as it will be read back, so that the rounding of k is corrected with the rest.
//   k^ = round(x W_K / s), r = x P + k^ R;   V = k^ W_KV + r^ B, K = k^ s
// Where keys are normed (QK-norm), k stays as it is and 1 / rms(k) stands beside it, for the scores.
#include "cache/attend.h"
#include "cache/modes/modes.h"
#include "cache/prepare.h"
#include "core/error.h"

namespace slimrt {
namespace {

struct PreparedK : Prepared {
    using Prepared::Prepared;
    Tensor w_kv;                    // [v width, k width], V = linear(k row, .) * v_scale + residual
    Tensor v_scale, out_scale;      // k+r: [1, v width] or none; the same for query heads
    Tensor residual_x, residual_k;  // k+r: residual row = linear(x, .) + linear(k row, .)
    Tensor residual_v;              // k+r: [v width, rank], residual = linear(residual row, .)
    Tensor row_scale, row_shrink;   // [1, k width] of channels: K = row * row_scale, static scales' inverses
    Tensor bias;                    // of K, where it matters

    uint64_t fingerprint(Backend& backend) const override {
        return fingerprint_of(backend, {row_shrink, residual_x, residual_k});
    }
};

const PreparedK& prepared(const AttnInput& in) { return static_cast<const PreparedK&>(in.prepared); }

Format with_norm(Format planes, const AttnConfig& c) {
    if (c.qk_norm_eps) planes.push_back({"n", 1, 1, DType::F32});
    return planes;
}

class K : public AbsorbingMode {
  public:
    const char* name() const override { return "k"; }
    bool serves(bool) const override { return true; }

    std::string refusal(const AttnConfig& c) const override {
        if (c.cross) return narrow_encoder_k(c, "V");
        if (c.kv_width() >= c.d_model) return "";
        return concat("K is ", c.kv_width(), " wide (", c.n_kv_heads, " KV heads, ", c.n_heads,
                      " query heads) and the layer's input ", c.d_model,
                      ", so V cannot be computed from K; K-only needs multi-head attention");
    }

    Format format(const AttnConfig& c) const override {
        return with_norm({whole_plane("k", c.kv_width(), c.n_kv_heads, c.type_k)}, c);
    }

    Format dense_format(const AttnConfig& c) const override {
        return {{"v", c.kv_width(), 1, dense_type(c.type_k)}};
    }

    std::vector<Fold> folds(const AttnConfig& c) const override {
        return {{folded(c), c.kv_width(), c.kv_width()}};
    }
    std::vector<Unread> unread(const AttnConfig& c) const override {
        if (!c.cross) return {{"attn_v.weight", true}};
        return {{"cross_attn_k.weight", false}, {"cross_attn_v.weight", true}};
    }
    bool has_values_of_all() const override { return true; }
    const char* inverts() const override { return "W_K"; }

    std::unique_ptr<Prepared> prepare(Backend&, const PrepareInput& in) const override {
        auto p = std::make_unique<PreparedK>(in.weights);
        p->w_kv = in.folded.at(folded(in.config));
        p->row_scale = in.weights.k_norm;
        p->bias = bias_that_matters(in);
        return p;
    }

    std::vector<Projection> projections(const Prepared& p) const override { return {{p.model.k, {}}}; }

  protected:
    /// Without RoPE a bias of K shifts all scores of a query alike.
    static Tensor bias_that_matters(const PrepareInput& in) {
        return in.config.rope ? in.weights.k_bias : Tensor{};
    }

    /// The step's own values are read from k in full precision.
    Written write_rows(Backend& backend, const WriteInput& in) const override {
        Written written{.planes = in.projected};
        add_inverse_rms(backend, in, written);
        return written;
    }

    /// The plane of normed keys: 1 / rms of each row.
    static void add_inverse_rms(Backend& backend, const WriteInput& in, Written& written) {
        if (!in.config.qk_norm_eps) return;
        written.planes.push_back(in.scratch.f32(in.x.rows, 1));
        backend.inverse_rms(written.planes[0], *in.config.qk_norm_eps, written.planes.back());
    }

    void absorbed(Backend& backend, const ReadInput& in, const Written& own, Tensor out) const override {
        const AttnConfig& c = in.config;
        const PreparedK& p = prepared(in);
        const int64_t n = in.q.rows;
        const Tensor u = in.scratch.f32(n, int64_t(c.n_heads) * c.kv_width());  // p_i K, float32 into W_KV
        const ScoreTerm scores[] = {score_term(in, own)};
        std::vector<ValueTerm> values = {{in.rows[0], own.value(0), 1, c.kv_width(), u}};
        if (p.residual_v) {
            const Tensor u_r = in.scratch.f32(n, int64_t(c.n_heads) * c.rank);
            values.push_back({in.rows[1], own.value(1), 1, c.rank, u_r});
        }
        backend.attention(attention_args(in, scores, values));
        linear_heads(backend, c, u, p.w_kv, out);
        if (p.out_scale) backend.multiply(out, p.out_scale);
        if (!p.residual_v) return;
        const Tensor rest = in.scratch.f32(out.rows, out.cols);
        linear_heads(backend, c, values[1].out, p.residual_v, rest);
        backend.add(out, rest);
    }

    std::vector<Tensor> dense_of(Backend& backend, const AttnInput& in, Tensor x) const override {
        return project(backend, in.scratch, x, {{in.prepared.model.v, {}}});
    }

    void dense_of_stored(Backend& backend, const ReadInput& in, int64_t begin, int64_t end,
                         const std::vector<Tensor>& planes) const override {
        const PreparedK& p = prepared(in);
        const int32_t* const table = in.sequences[0].table;
        const Tensor v = planes[0], k = in.scratch.f32(end - begin, in.config.kv_width());
        backend.load(in.rows[0], table, begin, end, k);
        backend.linear(k, p.w_kv, {}, v);
        if (p.v_scale) backend.multiply(v, p.v_scale);
        if (!p.residual_v) return;
        const Tensor residual = in.scratch.f32(end - begin, in.config.rank);
        backend.load(in.rows[1], table, begin, end, residual);
        backend.add(v, project(backend, in.scratch, residual, {{p.residual_v, {}}})[0]);
    }

    void materialised(Backend& backend, const ReadInput& in, const Written& own, Tensor out) const override {
        const AttnConfig& c = in.config;
        const ScoreTerm scores[] = {score_term(in, own)};
        const ValueTerm values[] = {
            {dense_rows(in.dense.planes[0], 0), own.dense[0], c.n_kv_heads, c.head_dim, out}};
        backend.attention(attention_args(in, scores, values));
    }

  private:
    static const char* folded(const AttnConfig& c) {
        return c.cross ? "cross_attn_kv.weight" : "attn_kv.weight";
    }

    /// Scores of q with k, scaled, normed and rotated on read.
    static ScoreTerm score_term(const ReadInput& in, const Written& own) {
        const PreparedK& p = prepared(in);
        const bool normed = in.config.qk_norm_eps.has_value();
        return {.stored = in.rows[0],
                .fresh = own.plane(0),
                .n_heads = in.config.n_kv_heads,
                .dim = in.config.head_dim,
                .q = in.q,
                .row_scale = p.row_scale,
                .factors = normed ? in.rows.back() : Rows{},
                .fresh_factors = normed ? own.planes.back() : Tensor{},
                .bias = p.bias,
                .rope = in.rope};
    }
};

constexpr const char *kWkv = "attn_kr_v.weight", *kWkvScale = "attn_kr_v.scale",
                     *kRowScale = "attn_kr_row.scale", *kResidualX = "attn_kr_x.weight",
                     *kResidualK = "attn_kr_k.weight", *kResidualV = "attn_kr_out.weight";

class KResidual final : public K {
  public:
    const char* name() const override { return "k+r"; }
    bool serves(bool cross) const override { return !cross; }
    bool has_residual() const override { return true; }
    std::string refusal(const AttnConfig&) const override { return ""; }

    /// Static scales even out the channels: one scale a row is enough for the types that have one.
    Format format(const AttnConfig& c) const override {
        Format planes = {{"k", c.kv_width(), has_groups(c.type_k) ? c.n_kv_heads : 1, c.type_k}};
        if (c.rank > 0) planes.push_back({"r", c.rank, 1, c.type_r});
        return with_norm(planes, c);
    }

    const char* inverts() const override { return ""; }  // weighs rounding against what it inverts
    std::vector<Fold> folds(const AttnConfig& c) const override {
        const int wide = c.kv_width();
        const bool residual = c.rank > 0;
        return {{kWkv, wide, wide},
                {kWkvScale, 1, wide, false, false},
                row_scale_fold(c, kRowScale, wide),
                {kResidualX, c.rank, c.d_model, residual, residual},
                {kResidualK, c.rank, wide, residual, residual},
                {kResidualV, wide, c.rank, residual, residual}};
    }

    std::unique_ptr<Prepared> prepare(Backend& backend, const PrepareInput& in) const override {
        const AttnConfig& c = in.config;
        auto p = std::make_unique<PreparedK>(in.weights);
        p->w_kv = in.folded.at(kWkv);
        p->v_scale = in.folded.at(kWkvScale);
        if (p->v_scale)
            p->out_scale = derived_vector(backend, for_query_heads(c, values_of(backend, p->v_scale)),
                                          "scales of W_KV", p->owned);
        p->row_scale = in.folded.at(kRowScale);
        p->row_shrink = row_shrink(backend, c, kRowScale, p->row_scale, p->owned);
        if (in.weights.k_norm) p->row_scale = scaled_norm(backend, in.weights.k_norm, p->row_scale, p->owned);
        p->residual_x = in.folded.at(kResidualX);
        p->residual_k = in.folded.at(kResidualK);
        p->residual_v = in.folded.at(kResidualV);
        p->bias = bias_that_matters(in);
        return p;
    }

    std::vector<Projection> projections(const Prepared& prepared) const override {
        const PreparedK& p = static_cast<const PreparedK&>(prepared);
        if (!p.residual_x) return {{p.model.k, {}}};
        return {{p.model.k, {}}, {p.residual_x, {}}};
    }

  protected:
    /// The step's own values are read as later steps will read them.
    Written write_rows(Backend& backend, const WriteInput& in) const override {
        const PreparedK& p = prepared(in);
        const Format planes = format(in.config);
        const Tensor k = in.projected[0];
        Written written{.planes = in.projected};
        add_inverse_rms(backend, in, written);
        if (p.row_shrink) backend.multiply(k, p.row_shrink);
        written.read_back = {as_stored(backend, in.scratch, k, planes[0])};
        if (!p.residual_x) return written;
        const Tensor residual = in.projected[1];
        {
            const Scratch::Scope scope(in.scratch);
            const Tensor known_k = written.read_back[0];
            backend.add(residual, project(backend, in.scratch, known_k, {{p.residual_k, {}}})[0]);
        }
        written.read_back.push_back(as_stored(backend, in.scratch, residual, planes[1]));
        return written;
    }

  private:
    /// The norm's weight times the static scales, if there are any.
    static Tensor scaled_norm(Backend& backend, Tensor norm, Tensor scale, std::vector<Buffer>& owned) {
        if (!scale) return norm;
        std::vector<float> values = values_of(backend, scale);
        const std::vector<float> others = values_of(backend, norm);
        for (size_t i = 0; i < values.size(); ++i) values[i] *= others[i];
        return derived_vector(backend, values, "scales of a normed row", owned);
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
