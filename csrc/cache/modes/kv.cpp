// Mode kv: K (normed and rotated) and V as they are, the baseline of all other modes. Where V is K before its
// norm's weight and RoPE (Gemma 4), that is stored once, and scores apply both on read.
#include "cache/attend.h"
#include "cache/modes/modes.h"
#include "cache/prepare.h"

namespace slimrt {
namespace {

struct PreparedKv : Prepared {
    using Prepared::Prepared;
    Tensor row_scale;  // with v_is_k: the weight of K's norm for each column of a row
};

class Kv final : public CacheMode {
  public:
    const char* name() const override { return "kv"; }
    bool serves(bool) const override { return true; }
    bool has_values_alone() const override { return true; }
    bool keeps_v_bias() const override { return true; }
    std::string refusal(const AttnConfig&) const override { return ""; }
    Format format(const AttnConfig& c) const override {
        if (c.v_is_k) return {{"kv", c.kv_width(), c.n_kv_heads, c.type_k}};
        return {{"k", c.kv_width(), c.n_kv_heads, c.type_k}, {"v", c.kv_width(), c.n_kv_heads, c.type_v}};
    }

    std::vector<Unread> unread(const AttnConfig& c) const override {
        if (!c.cross) return {};
        return {{"cross_attn_k.weight", false}, {"cross_attn_v.weight", false}};
    }

    std::unique_ptr<Prepared> prepare(Backend& backend, const PrepareInput& in) const override {
        auto p = std::make_unique<PreparedKv>(in.weights);
        if (in.config.v_is_k)
            p->row_scale = norm_of_heads(backend, in.weights.k_norm, in.config.n_kv_heads, p->owned);
        return p;
    }

    std::vector<Projection> projections(const Prepared& p) const override {
        if (p.model.v.data == p.model.k.data) return {{p.model.k, p.model.k_bias}};
        return {{p.model.k, p.model.k_bias}, {p.model.v, p.model.v_bias}};
    }

    Written write(Backend& backend, const WriteInput& in) const override {
        const Tensor k = in.projected[0];
        clamp(backend, in.config, in.projected);
        norm_values(backend, in.config, in.projected.back());
        if (in.config.v_is_k) return {.planes = in.projected};
        norm_heads(backend, in.config, in.prepared.model.k_norm, k, k);
        if (in.rope) backend.rope(k, in.config.n_kv_heads, in.rope, in.positions);
        return {.planes = in.projected};
    }

    void read(Backend& backend, const ReadInput& in, const Written& written, Tensor out) const override {
        const AttnConfig& c = in.config;
        const size_t v = c.v_is_k ? 0 : 1;
        ScoreTerm scores[] = {{in.rows[0], written.plane(0), c.n_kv_heads, c.head_dim, in.q}};
        if (c.v_is_k) {
            scores[0].row_scale = static_cast<const PreparedKv&>(in.prepared).row_scale;
            scores[0].rope = in.rope;
        }
        const ValueTerm values[] = {{in.rows[v], written.plane(v), c.n_kv_heads, c.head_dim, out}};
        backend.attention(attention_args(in, scores, values));
    }
};

}  // namespace

const CacheMode* kv_mode() {
    static const Kv mode;
    return &mode;
}

}  // namespace slimrt
