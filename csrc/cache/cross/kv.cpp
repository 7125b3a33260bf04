// Cross-attention mode kv: each layer's K and V of the encoder's output. The baseline.
#include "cache/cross/cross.h"

namespace slimrt {
namespace {

class CrossKv final : public CrossMode {
  public:
    const char* name() const override { return "kv"; }
    std::string refusal(const AttnConfig&) const override { return ""; }
    Format format(const AttnConfig& c) const override {
        return {{"k", c.kv_width(), c.n_kv_heads, c.type_k}, {"v", c.kv_width(), c.n_kv_heads, c.type_v}};
    }

    FreshRows rows(Backend& backend, const AttnWeights& w, Scratch& scratch, Tensor e) const override {
        return project(backend, scratch, e, {{w.k, w.k_bias}, {w.v, w.v_bias}});
    }

    Tensor keys(Backend&, const AttnWeights&, Scratch&, Tensor rows) const override { return rows; }

    void attend(Backend& backend, const CrossInput& in, Tensor out) const override {
        const AttnConfig& c = in.config;
        const Tensor q = cross_queries(backend, in);
        cross_attention(backend, c, in.sources, {in.rows[0], {}, c.n_kv_heads, c.head_dim, q},
                        {in.rows[1], {}, c.n_kv_heads, c.head_dim, out});
    }
};

}  // namespace

const CrossMode* cross_kv_mode() {
    static const CrossKv mode;
    return &mode;
}

}  // namespace slimrt
