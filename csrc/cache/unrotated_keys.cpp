#include "cache/unrotated_keys.h"

#include "cache/attend.h"
#include "cache/modes/modes.h"

namespace slimrt {
namespace {

const Rope kNoRope;

/// kv with keys stored before RoPE; readers that rotate them do so on read, by ReadInput::rope.
class UnrotatedKv final : public CacheMode {
  public:
    const char* name() const override { return kv_mode()->name(); }
    bool has_values_alone() const override { return kv_mode()->has_values_alone(); }
    bool keeps_v_bias() const override { return kv_mode()->keeps_v_bias(); }
    std::string refusal(const AttnConfig& c) const override { return kv_mode()->refusal(c); }
    Format format(const AttnConfig& c) const override { return kv_mode()->format(c); }
    std::vector<Projection> projections(const Prepared& p) const override {
        return kv_mode()->projections(p);
    }

    Written write(Backend& backend, const WriteInput& in) const override {
        const AttnInput still{in.config,    in.prepared, kNoRope,   in.positions,
                              in.sequences, in.chunk,    in.scratch};
        return kv_mode()->write(backend, {still, in.x, in.projected, in.shared});
    }

    void read(Backend& backend, const ReadInput& in, const Written& written, Tensor out) const override {
        const AttnConfig& c = in.config;
        const ScoreTerm scores[] = {{.stored = in.rows[0],
                                     .fresh = written.plane(0),
                                     .n_heads = c.n_kv_heads,
                                     .dim = c.head_dim,
                                     .q = in.q,
                                     .rope = in.rope}};
        const ValueTerm values[] = {{in.rows[1], written.plane(1), c.n_kv_heads, c.head_dim, out}};
        backend.attention(attention_args(in, scores, values));
    }
};

}  // namespace

const CacheMode* with_unrotated_keys(const CacheMode& mode, const AttnConfig& c) {
    static const UnrotatedKv unrotated_kv;
    if (&mode == kv_mode() && c.rope && !c.v_is_k) return &unrotated_kv;
    const bool rotates_on_read =
        &mode == k_mode() || &mode == kr_mode() || &mode == lowrank_mode() || &mode == kv_mode();
    return rotates_on_read || !c.rope ? &mode : nullptr;
}

std::string unrotated_refusal(const CacheMode& mode, const AttnConfig& c) {
    if (with_unrotated_keys(mode, c)) return "";
    return "other layers read its keys before RoPE (slimrt.cache.shared_keys), and this mode rotates them "
           "for all";
}

}  // namespace slimrt
