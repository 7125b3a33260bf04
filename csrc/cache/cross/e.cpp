// Cross-attention mode e (slim attention's option 2): one encoder output E for all layers, and nothing to
// compute from it before decoding; both products are absorbed, as in mode x:
//   scores_i = (q_i W_K,i^T) E^T, head_i = (p_i E) W_V,i.
// Mode e1 (the hybrid): K of the first layer in its place, K_1 = E W_K,1, and W_K,1^-1 W_K, W_K,1^-1 W_V of
// the others, folded offline.
// Types with scales take one for a whole row, so that its products are integer ones; channels are made alike
// before, by the size that the encoder's last norm gives them.
#include "cache/cross/cross.h"

namespace slimrt {
namespace {

class CrossE : public CrossMode {
  public:
    const char* name() const override { return "e"; }
    bool shared() const override { return true; }
    std::string refusal(const AttnConfig&) const override { return ""; }
    Format format(const AttnConfig& c) const override { return {{"e", c.d_model, 1, c.type_k}}; }

    void prepare(Backend& backend, const AttnConfig& c, DerivedWeights& derived,
                 AttnWeights& w) const override {
        w.row_k = w.k;
        w.row_v = w.v;
        if (head_bytes(c.type_k, 1).scales) {
            const std::vector<float> sizes = derived.source_sizes();
            std::vector<float> scale, shrink;
            for (int head = 0; head < c.n_heads; ++head)
                scale.insert(scale.end(), sizes.begin(), sizes.end());
            for (const float size : sizes) shrink.push_back(1 / size);
            w.row_scale = derived_vector(backend, w, scale, "sizes of an encoder's channels");
            w.row_shrink = derived_vector(backend, w, shrink, "sizes of an encoder's channels");
        }
        absorb(backend, c, w);
    }

    FreshRows rows(Backend& backend, const AttnWeights& w, Scratch& scratch, Tensor e) const override {
        if (!w.row_shrink) return {e};
        const Tensor row = scratch.f32(e.rows, e.cols);
        backend.multiply(e, w.row_shrink, row);
        return {row};
    }

    Tensor keys(Backend& backend, const AttnWeights& w, Scratch& scratch, Tensor rows) const override {
        if (w.row_scale) backend.multiply(rows, w.row_scale.cols_of(0, rows.cols));
        return project(backend, scratch, rows, {{w.row_k, {}}})[0];
    }

    void attend(Backend& backend, const CrossInput& in, Tensor out) const override {
        const AttnConfig& c = in.config;
        const int width = in.rows[0].width;
        const int64_t wide = int64_t(c.n_heads) * width;
        const Tensor q = cross_queries(backend, in);
        some_queries(in, [&](int64_t first, int64_t n, std::span<const AttentionSequence> sources) {
            const Tensor wide_q = in.scratch.f32(n, wide), u = in.scratch.f32(n, wide);
            const Tensor scale = in.weights.row_scale;  // of the row's channels, for each head
            backend.linear_per_head(q.rows_of(first, n), in.weights.absorbed_q, c.n_heads, wide_q);
            if (scale) backend.multiply(wide_q, scale);
            cross_attention(backend, c, sources, {in.rows[0], {}, 1, width, wide_q},
                            {in.rows[0], {}, 1, width, u});
            if (scale) backend.multiply(u, scale);
            linear_heads(backend, c, u, in.weights.row_v, out.rows_of(first, n));
        });
    }

  protected:
    /// row_k and row_v take a stored row to K and V.
    static void absorb(Backend& backend, const AttnConfig& c, AttnWeights& w) {
        absorb_q(backend, c, w.row_k, w);
        fold_v_bias(backend, c, w);
        w.k_bias = {};  // shifts all scores of a query alike
    }
};

class CrossE1 final : public CrossE {
  public:
    const char* name() const override { return "e1"; }
    std::string refusal(const AttnConfig& c) const override { return narrow_k(c, "K and V of other layers"); }
    Format format(const AttnConfig& c) const override {
        return {whole_plane("k1", c.kv_width(), c.n_kv_heads, c.type_k)};
    }

    void prepare(Backend& backend, const AttnConfig& c, DerivedWeights& derived,
                 AttnWeights& w) const override {
        w.row_k = derived.folded(c.layer, "cross_attn_k1_k.weight", c.kv_width(), c.kv_width());
        w.row_v = derived.folded(c.layer, "cross_attn_k1_v.weight", c.kv_width(), c.kv_width());
        absorb(backend, c, w);
    }

    FreshRows rows(Backend& backend, const AttnWeights& w, Scratch& scratch, Tensor e) const override {
        return project(backend, scratch, e, {{w.k, {}}});
    }
};

}  // namespace

const CrossMode* cross_e_mode() {
    static const CrossE mode;
    return &mode;
}

const CrossMode* cross_e1_mode() {
    static const CrossE1 mode;
    return &mode;
}

}  // namespace slimrt
