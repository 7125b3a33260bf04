// Mode kv: K (normed and rotated) and V as they are. The baseline every other mode is compared with.
#include "cache/modes/modes.h"

namespace slimrt {
namespace {

class Kv final : public CacheMode {
  public:
    const char* name() const override { return "kv"; }
    bool has_values_alone() const override { return true; }
    std::string refusal(const AttnConfig&) const override { return ""; }
    Format format(const AttnConfig& c) const override {
        return {{"k", c.kv_width(), c.n_kv_heads, c.type_k}, {"v", c.kv_width(), c.n_kv_heads, c.type_v}};
    }

    FreshRows attend(Backend& backend, const AttnInput& in, Tensor out) const override {
        const AttnConfig& c = in.config;
        const AttnWeights& w = in.weights;
        const auto qkv = project_q_and(backend, in, {{w.k, w.k_bias}, {w.v, w.v_bias}});
        const Tensor q = qkv[0], k = qkv[1], v = qkv[2];
        if (w.k_norm) backend.norm(NormKind::rms, k, w.k_norm, {}, *c.qk_norm_eps, k);
        if (c.rope) backend.rope(k, c.n_kv_heads, in.rope, in.batch.positions);

        const ScoreTerm scores[] = {{in.rows[0], k, c.n_kv_heads, c.head_dim, q}};
        const ValueTerm values[] = {{in.rows[1], v, c.n_kv_heads, c.head_dim, out}};
        backend.attention(attention_args(in, in.group.sequences, scores, values));
        return {k, v};
    }
};

}  // namespace

const CacheMode* kv_mode() {
    static const Kv mode;
    return &mode;
}

}  // namespace slimrt
