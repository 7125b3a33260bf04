// Cross-attention mode k (slim attention's option 1): each layer's K alone, V = K W_KV as in mode k.
#include "cache/cross/cross.h"

namespace slimrt {
namespace {

class CrossK final : public CrossMode {
  public:
    const char* name() const override { return "k"; }
    std::string refusal(const AttnConfig& c) const override { return narrow_k(c, "V"); }
    Format format(const AttnConfig& c) const override {
        return {whole_plane("k", c.kv_width(), c.n_kv_heads, c.type_k)};
    }

    void prepare(Backend& backend, const AttnConfig& c, DerivedWeights& derived,
                 AttnWeights& w) const override {
        w.w_kv = derived.folded(c.layer, "cross_attn_kv.weight", c.kv_width(), c.kv_width());
        fold_v_bias(backend, c, w);
        w.k_bias = {};  // shifts all scores of a query alike
    }

    FreshRows rows(Backend& backend, const AttnWeights& w, Scratch& scratch, Tensor e) const override {
        return project(backend, scratch, e, {{w.k, {}}});
    }

    Tensor keys(Backend&, const AttnWeights&, Scratch&, Tensor rows) const override { return rows; }

    void attend(Backend& backend, const CrossInput& in, Tensor out) const override {
        const AttnConfig& c = in.config;
        const Tensor q = cross_queries(backend, in);
        some_queries(in, [&](int64_t first, int64_t n, std::span<const AttentionSequence> sources) {
            const Tensor u = in.scratch.f32(n, int64_t(c.n_heads) * c.kv_width());
            cross_attention(backend, c, sources,
                            {in.rows[0], {}, c.n_kv_heads, c.head_dim, q.rows_of(first, n)},
                            {in.rows[0], {}, 1, c.kv_width(), u});
            linear_heads(backend, c, u, in.weights.w_kv, out.rows_of(first, n));
        });
    }
};

}  // namespace

const CrossMode* cross_k_mode() {
    static const CrossK mode;
    return &mode;
}

}  // namespace slimrt
