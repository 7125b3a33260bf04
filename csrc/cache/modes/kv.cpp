// Mode kv: K (normed and rotated) and V as they are. The baseline every other mode is compared with.
#include "cache/attend.h"
#include "cache/modes/modes.h"

namespace slimrt {
namespace {

class Kv final : public CacheMode {
  public:
    const char* name() const override { return "kv"; }
    bool serves(bool) const override { return true; }
    bool has_values_alone() const override { return true; }
    bool keeps_v_bias() const override { return true; }
    std::string refusal(const AttnConfig&) const override { return ""; }
    Format format(const AttnConfig& c) const override {
        return {{"k", c.kv_width(), c.n_kv_heads, c.type_k}, {"v", c.kv_width(), c.n_kv_heads, c.type_v}};
    }

    std::vector<Unread> unread(const AttnConfig& c) const override {
        if (!c.cross) return {};
        return {{"cross_attn_k.weight", false}, {"cross_attn_v.weight", false}};
    }

    std::vector<Projection> projections(const Prepared& p) const override {
        return {{p.model.k, p.model.k_bias}, {p.model.v, p.model.v_bias}};
    }

    Written write(Backend& backend, const WriteInput& in) const override {
        const Tensor k = in.projected[0];
        clamp(backend, in.config, in.projected);
        norm_heads(backend, in.config, in.prepared.model.k_norm, k, k);
        if (in.rope) backend.rope(k, in.config.n_kv_heads, in.rope, in.positions);
        return {.planes = in.projected};
    }

    void read(Backend& backend, const ReadInput& in, const Written& written, Tensor out) const override {
        const AttnConfig& c = in.config;
        const ScoreTerm scores[] = {{in.rows[0], written.plane(0), c.n_kv_heads, c.head_dim, in.q}};
        const ValueTerm values[] = {{in.rows[1], written.plane(1), c.n_kv_heads, c.head_dim, out}};
        backend.attention(attention_args(in, scores, values));
    }
};

}  // namespace

const CacheMode* kv_mode() {
    static const Kv mode;
    return &mode;
}

}  // namespace slimrt
