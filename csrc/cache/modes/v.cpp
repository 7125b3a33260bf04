// Mode v: V alone, without bias, for models without RoPE. K = V W_VK, W_VK = W_V^-1 W_K, is absorbed in the
// query: scores_i = (q_i W_VK,i^T) V^T over whole rows. The inverse amplifies rounding in the scores, as that
// of k does in V. K's bias is left out: it shifts all scores of a query alike.
#include "cache/attend.h"
#include "cache/modes/modes.h"
#include "cache/prepare.h"
#include "core/error.h"

namespace slimrt {
namespace {

constexpr const char* kFolded = "attn_vk.weight";

struct PreparedV : Prepared {
    using Prepared::Prepared;
    Tensor w_vk;        // [k width, v width], K = linear(V, .)
    Tensor absorbed_q;  // for each head: q -> query against whole rows
};

const PreparedV& prepared(const AttnInput& in) { return static_cast<const PreparedV&>(in.prepared); }

class V final : public AbsorbingMode {
  public:
    const char* name() const override { return "v"; }

    std::string refusal(const AttnConfig& c) const override {
        if (c.qk_norm_eps) return "keys are normed (QK-norm), so scores cannot be read from V";
        if (c.rope) return "keys are rotated by position (RoPE), which a V row does not know";
        if (c.kv_width() >= c.d_model) return capped_without_bias(c);
        return concat("V is ", c.kv_width(), " wide and the layer's input ", c.d_model,
                      ", so K cannot be computed from V; V-only needs multi-head attention");
    }

    Format format(const AttnConfig& c) const override {
        return {whole_plane("v", c.kv_width(), c.n_kv_heads, c.type_v)};
    }

    Format dense_format(const AttnConfig& c) const override {
        return {{"k", c.kv_width(), 1, dense_type(c.type_v)}};
    }

    std::vector<Fold> folds(const AttnConfig& c) const override {
        return {{kFolded, c.kv_width(), c.kv_width()}};
    }
    std::vector<Unread> unread(const AttnConfig&) const override {
        return {{"attn_k.weight", true}, {kFolded, true}};
    }
    const char* inverts() const override { return "W_V"; }

    std::unique_ptr<Prepared> prepare(Backend& backend, const PrepareInput& in) const override {
        auto p = std::make_unique<PreparedV>(in.weights);
        p->w_vk = in.folded.at(kFolded);
        p->absorbed_q = absorb_q(backend, in.config, p->w_vk, p->owned);
        return p;
    }

    std::vector<Projection> projections(const Prepared& p) const override { return {{p.model.v, {}}}; }

  protected:
    Written write_rows(Backend&, const WriteInput& in) const override { return {.planes = in.projected}; }

    void absorbed(Backend& backend, const ReadInput& in, const Written& own, Tensor out) const override {
        const AttnConfig& c = in.config;
        const Tensor wide_q = in.scratch.f32(in.q.rows, int64_t(c.n_heads) * c.kv_width());
        backend.linear_per_head(in.q, prepared(in).absorbed_q, c.n_heads, wide_q);
        const ScoreTerm scores[] = {{in.rows[0], own.plane(0), 1, c.kv_width(), wide_q}};
        const ValueTerm values[] = {{in.rows[0], own.plane(0), c.n_kv_heads, c.head_dim, out}};
        backend.attention(attention_args(in, scores, values));
    }

    std::vector<Tensor> dense_of(Backend& backend, const AttnInput& in, const Written& own) const override {
        return project(backend, in.scratch, own.x, {{in.prepared.model.k, {}}});
    }

    void dense_of_stored(Backend& backend, const ReadInput& in, int64_t begin, int64_t end,
                         const std::vector<Tensor>& planes) const override {
        const Tensor v = in.scratch.f32(end - begin, in.config.kv_width());
        backend.load(in.rows[0], in.sequences[0].table, begin, end, v);
        backend.linear(v, prepared(in).w_vk, {}, planes[0]);
    }

    void materialised(Backend& backend, const ReadInput& in, const Written& own, Tensor out) const override {
        const AttnConfig& c = in.config;
        const ScoreTerm scores[] = {
            {dense_rows(in.dense.planes[0], 0), own.dense[0], c.n_kv_heads, c.head_dim, in.q}};
        const ValueTerm values[] = {{in.rows[0], own.plane(0), c.n_kv_heads, c.head_dim, out}};
        backend.attention(attention_args(in, scores, values));
    }
};

}  // namespace

const CacheMode* v_mode() {
    static const V mode;
    return &mode;
}

}  // namespace slimrt
