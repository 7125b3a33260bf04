// Mode lowrank (TALE): what is stored of V is a latent of some heads together, its columns ordered by weight.
// Older rows keep the first ones, in few bits; decoding sums latents and makes V of the sum, once. A prompt
// reads V itself.
//   latent = v T, V = latent E, T and E square and folded offline: all columns together are V itself.
//   head_i = [sum of p_i latent over each region, with as many columns as its rows have] E_i
// K has the same regions in full width, before RoPE, where channels vary less, as few bits need. With
// Levels::predicts an aged row keeps a latent of what its keys, as they are stored, do not predict of V:
//   latent = (v - k^ P) T, head_i = (...) E_i + [sum of p_i k^] P_i, k^ of the same group of heads.
#include "cache/modes/aging.h"
#include "cache/modes/modes.h"
#include "cache/prepare.h"

namespace slimrt {
namespace {

constexpr const char* kLatent = "attn_v_latent.weight";
constexpr const char* kExpand = "attn_v_expand.weight";
constexpr const char* kPredict = "attn_v_predict.weight";

struct PreparedLatent : Prepared {
    using Prepared::Prepared;
    Tensor latent;   // [kv width, columns], group by group: latent = linear(v, .)
    Tensor expand;   // [kv width, columns], KV head by KV head: v = linear(latent of its group, .)
    Tensor predict;  // [kv width, columns] or none: v is about linear(k of its group, .)

    uint64_t fingerprint(Backend& backend) const override {
        return fingerprint_of(backend, {latent, predict});
    }
};

const PreparedLatent& prepared(const AttnInput& in) {
    return static_cast<const PreparedLatent&>(in.prepared);
}

class LowRank final : public AgingMode {
  public:
    const char* name() const override { return "lowrank"; }
    bool has_latents() const override { return true; }
    Levels default_levels() const override {
        return {{{DType::Q2, DType::Q2, 0.5, 0}, {DType::Q4, DType::Q4, 1, 0.1}}, 4, 0};
    }

    std::vector<Fold> folds(const AttnConfig& c) const override {
        const int columns = c.latent_heads * c.head_dim;
        const bool predicts = c.levels.predicts;
        return {{kLatent, c.kv_width(), columns},
                {kExpand, c.kv_width(), columns},
                {.suffix = kPredict,
                 .rows = c.kv_width(),
                 .cols = columns,
                 .required = predicts,
                 .planned = predicts,
                 .used = predicts}};
    }

    std::unique_ptr<Prepared> prepare(Backend&, const PrepareInput& in) const override {
        auto p = std::make_unique<PreparedLatent>(in.weights);
        p->latent = in.folded.at(kLatent);
        p->expand = in.folded.at(kExpand);
        p->predict = in.folded.at(kPredict);
        return p;
    }

    std::vector<Projection> projections(const Prepared& p) const override {
        return {{p.model.k, p.model.k_bias}, {p.model.v, {}}};
    }

  protected:
    int value_heads(const AttnConfig& c) const override { return c.n_kv_heads / c.latent_heads; }
    bool raw_keys() const override { return true; }

    Tensor latents_of(Backend& backend, const AttnInput& in, Tensor v) const override {
        const Tensor latent = in.scratch.f32(v.rows, v.cols);
        backend.linear_per_head(v, prepared(in).latent, value_heads(in.config), latent);
        return latent;
    }

    void values_of(Backend& backend, const AttnInput& in, Tensor latents, Tensor v) const override {
        backend.linear_per_head(latents, prepared(in).expand, value_heads(in.config), v);
    }

    Tensor before_heads(const AttnInput& in, Tensor out) const override {
        return in.scratch.f32(out.rows, out.cols * in.config.latent_heads);
    }

    void to_heads(Backend& backend, const AttnInput& in, Tensor latents, Tensor keys,
                  Tensor out) const override {
        backend.linear_per_head(latents, prepared(in).expand, in.config.n_heads, out);
        if (!keys) return;
        const Scratch::Scope scope(in.scratch);
        const Tensor predicted = in.scratch.f32(out.rows, out.cols);
        backend.linear_per_head(keys, prepared(in).predict, in.config.n_heads, predicted);
        backend.add(out, predicted);
    }

    void add_predicted(Backend& backend, const AttnInput& in, Tensor keys, float times,
                       Tensor latents) const override {
        const Scratch::Scope scope(in.scratch);
        const Tensor v = in.scratch.f32(keys.rows, keys.cols);
        backend.linear_per_head(keys, prepared(in).predict, value_heads(in.config), v);
        const Tensor predicted = latents_of(backend, in, v);
        backend.scale(predicted, times);
        backend.add(latents, predicted);
    }
};

}  // namespace

const CacheMode* lowrank_mode() {
    static const LowRank mode;
    return &mode;
}

}  // namespace slimrt
