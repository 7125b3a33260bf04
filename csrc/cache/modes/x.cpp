// Mode x: the layer's normed input, for models without RoPE; any number of KV heads, nothing is inverted.
//   scores_i = (q_i W_K,i^T) X^T, head_i = (p_i X) W_V,i: both absorbed, over whole rows.
// Mode e (slim attention's option 2) is x with the encoder as owner: its output E serves all layers, and
// nothing is computed from it before decoding. Mode e1 (the hybrid) stores K of the first layer, K_1 = E
// W_K,1, with W_K,1^-1 W_K and W_K,1^-1 W_V of each layer, folded offline. K's bias is left out: it shifts
// all scores of a query alike.
#include "cache/attend.h"
#include "cache/modes/modes.h"
#include "cache/prepare.h"
#include "core/error.h"

namespace slimrt {
namespace {

struct PreparedX : Prepared {
    using Prepared::Prepared;
    Tensor row_k, row_v;  // [kv width, row width], k and v = linear(row * row_scale, .)
    Tensor absorbed_q;    // for each head: q -> query against whole rows
    /// Sizes of channels, [1, n_heads * width], and 1 / sizes, [1, width]; or none.
    Tensor row_scale, row_shrink;
};

const PreparedX& prepared(const AttnInput& in) { return static_cast<const PreparedX&>(in.prepared); }

class X : public AbsorbingMode {
  public:
    const char* name() const override { return "x"; }

    std::string refusal(const AttnConfig& c) const override {
        if (c.qk_norm_eps) return "keys are normed (QK-norm), so scores cannot be read from the input";
        if (c.rope) return "keys are rotated by position (RoPE), so scores cannot be read from the input";
        return capped_without_bias(c);
    }

    bool has_values_of_all() const override { return true; }
    Format format(const AttnConfig& c) const override {
        return {whole_plane("x", c.d_model, c.d_model % c.n_heads == 0 ? c.n_heads : 1, c.type_k)};
    }

    Format dense_format(const AttnConfig& c) const override {
        return {{"k", c.kv_width(), 1, dense_type(c.type_k)}, {"v", c.kv_width(), 1, dense_type(c.type_k)}};
    }

    std::vector<Unread> unread(const AttnConfig& c) const override {
        return {{c.cross ? "cross_attn_k.weight" : "attn_k.weight", true}};
    }

    std::unique_ptr<Prepared> prepare(Backend& backend, const PrepareInput& in) const override {
        return absorb(backend, in, in.weights.k, in.weights.v);
    }

    /// Of an encoder's rows.
    Tensor keys(Backend& backend, const Prepared& prepared, Scratch& scratch, Tensor rows) const override {
        const PreparedX& p = static_cast<const PreparedX&>(prepared);
        if (p.row_scale) backend.multiply(rows, p.row_scale.cols_of(0, rows.cols));
        return project(backend, scratch, rows, {{p.row_k, {}}})[0];
    }

  protected:
    static std::unique_ptr<PreparedX> absorb(Backend& backend, const PrepareInput& in, Tensor row_k,
                                             Tensor row_v) {
        auto p = std::make_unique<PreparedX>(in.weights);
        p->row_k = row_k;
        p->row_v = row_v;
        p->absorbed_q = absorb_q(backend, in.config, row_k, p->owned);
        return p;
    }

    Written write_rows(Backend& backend, const WriteInput& in) const override {
        if (!in.shared) return {.planes = {in.x}};
        const Tensor kept = in.scratch.f32(in.x.rows, in.x.cols);
        copy_rows(backend, in.x, kept);
        return {.planes = {kept}};
    }

    void absorbed(Backend& backend, const ReadInput& in, const Written& own, Tensor out) const override {
        const AttnConfig& c = in.config;
        const PreparedX& p = prepared(in);
        const int width = in.rows[0].width;
        const int64_t wide = int64_t(c.n_heads) * width;
        const Tensor wide_q = in.scratch.f32(in.q.rows, wide), u = in.scratch.f32(in.q.rows, wide);
        backend.linear_per_head(in.q, p.absorbed_q, c.n_heads, wide_q);
        if (p.row_scale) backend.multiply(wide_q, p.row_scale);
        const ScoreTerm scores[] = {{in.rows[0], own.plane(0), 1, width, wide_q}};
        const ValueTerm values[] = {{in.rows[0], own.plane(0), 1, width, u}};
        backend.attention(attention_args(in, scores, values));
        if (p.row_scale) backend.multiply(u, p.row_scale);
        backend.linear_per_head(u, p.row_v, c.n_heads, out);
    }

    std::vector<Tensor> dense_of(Backend& backend, const AttnInput& in, const Written& own) const override {
        return project(backend, in.scratch, own.x, {{prepared(in).row_k, {}}, {prepared(in).row_v, {}}});
    }

    void dense_of_stored(Backend& backend, const ReadInput& in, int64_t begin, int64_t end,
                         const std::vector<Tensor>& planes) const override {
        const Tensor rows = in.scratch.f32(end - begin, in.config.d_model);
        backend.load(in.rows[0], in.sequences[0].table, begin, end, rows);
        const Product products[] = {{prepared(in).row_k, {}, planes[0]}, {prepared(in).row_v, {}, planes[1]}};
        backend.linear(rows, products);
    }
};

class E final : public X {
  public:
    const char* name() const override { return "e"; }
    bool serves(bool cross) const override { return cross; }
    bool shared() const override { return true; }
    std::string refusal(const AttnConfig&) const override { return ""; }

    /// One scale a row in types with scales, so that its products are integer ones; channels are divided by
    /// their sizes before (PrepareInput::encoder_channel_sizes).
    Format format(const AttnConfig& c) const override { return {{"e", c.d_model, 1, c.type_k}}; }

    std::unique_ptr<Prepared> prepare(Backend& backend, const PrepareInput& in) const override {
        std::unique_ptr<PreparedX> p = absorb(backend, in, in.weights.k, in.weights.v);
        if (head_bytes(in.config.type_k, 1).scales == 0) return p;
        std::vector<float> scale, shrink;
        for (int head = 0; head < in.config.n_heads; ++head)
            scale.insert(scale.end(), in.encoder_channel_sizes.begin(), in.encoder_channel_sizes.end());
        for (const float size : in.encoder_channel_sizes) shrink.push_back(1 / size);
        p->row_scale = derived_vector(backend, scale, "sizes of an encoder's channels", p->owned);
        p->row_shrink = derived_vector(backend, shrink, "sizes of an encoder's channels", p->owned);
        return p;
    }

  protected:
    Written write_rows(Backend& backend, const WriteInput& in) const override {
        const Tensor shrink = prepared(in).row_shrink;
        if (!shrink) return {.planes = {in.x}};
        const Tensor row = in.scratch.f32(in.x.rows, in.x.cols);
        backend.multiply(in.x, shrink, row);
        return {.planes = {row}};
    }
};

class E1 final : public X {
  public:
    const char* name() const override { return "e1"; }
    bool serves(bool cross) const override { return cross; }
    bool shared() const override { return true; }
    std::string refusal(const AttnConfig& c) const override {
        return narrow_encoder_k(c, "K and V of other layers");
    }

    Format format(const AttnConfig& c) const override {
        return {whole_plane("k1", c.kv_width(), c.n_kv_heads, c.type_k)};
    }

    std::vector<Fold> folds(const AttnConfig& c) const override {
        return {{kFoldedK, c.kv_width(), c.kv_width()}, {kFoldedV, c.kv_width(), c.kv_width()}};
    }
    std::vector<Unread> unread(const AttnConfig&) const override {
        return {{"cross_attn_k.weight", true}, {"cross_attn_v.weight", true}, {kFoldedK, true}};
    }
    const char* inverts() const override { return "W_K"; }

    std::unique_ptr<Prepared> prepare(Backend& backend, const PrepareInput& in) const override {
        return absorb(backend, in, in.folded.at(kFoldedK), in.folded.at(kFoldedV));
    }

    std::vector<Projection> projections(const Prepared& p) const override { return {{p.model.k, {}}}; }

  protected:
    Written write_rows(Backend&, const WriteInput& in) const override { return {.planes = in.projected}; }

  private:
    static constexpr const char* kFoldedK = "cross_attn_k1_k.weight";
    static constexpr const char* kFoldedV = "cross_attn_k1_v.weight";
};

}  // namespace

const CacheMode* x_mode() {
    static const X mode;
    return &mode;
}

const CacheMode* e_mode() {
    static const E mode;
    return &mode;
}

const CacheMode* e1_mode() {
    static const E1 mode;
    return &mode;
}

}  // namespace slimrt
