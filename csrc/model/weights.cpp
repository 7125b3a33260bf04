#include "model/weights.h"

#include <algorithm>
#include <set>

#include "core/error.h"
#include "model/architecture.h"

namespace slimrt {

AttnConfig attention_config(const ModelConfig& c, int layer, DType type_k, DType type_v) {
    return {.layer = layer,
            .d_model = c.d_model,
            .n_heads = c.n_heads,
            .n_kv_heads = c.n_kv_heads,
            .head_dim = c.head_dim,
            .rope = c.architecture->positions != Positions::learned,
            .n_rot = c.rope.n_rot,
            .qk_norm_eps = c.architecture->qk_norm ? std::optional(c.norm_eps) : std::nullopt,
            .window = c.window,
            .type_k = type_k,
            .type_v = type_v};
}

namespace {

class Loader final : public DerivedWeights {
  public:
    Loader(const GgufFile& file, const ModelConfig& config, Backend& backend, const ExtraTensors& extra)
        : file_(file), c_(config), arch_(*config.architecture), backend_(backend), extra_(extra) {}

    Weights load(const std::vector<const CacheMode*>& modes, const std::vector<AttnConfig>& attn) {
        w_.token_embd = matrix("token_embd.weight", c_.n_vocab, c_.d_model);
        if (arch_.positions == Positions::learned)
            w_.position_embd = matrix("position_embd.weight", c_.n_ctx_train, c_.d_model);
        for (int layer = 0; layer < c_.n_layers; ++layer) {
            w_.layers.push_back(load_layer(layer));
            modes[layer]->prepare(backend_, attn[layer], *this, w_.layers.back().attn);
        }
        w_.output_norm = norm("output_norm");
        w_.output = matrix("output.weight", c_.n_vocab, c_.d_model, Presence::optional);
        if (!w_.output) w_.output = w_.token_embd;  // tied
        w_.output_bias = vector("output.bias", c_.n_vocab, arch_.output_bias);
        refuse_unused();
        return std::move(w_);
    }

    Tensor folded(int layer, const char* suffix, int64_t rows, int64_t cols) override {
        const std::string name = concat("blk.", layer, ".", suffix);
        if (file_.tensors().count(name)) return matrix(name, rows, cols);
        const auto it = extra_.find(name);
        if (it == extra_.end() && !backend_.dry())
            fail(ErrorCode::cache_unsupported, "tensor '", name,
                 "' is neither in the file nor given: fold the model first (slimrt convert --cache)");
        const Tensor out = own(DType::F32, rows, cols, MemoryKind::derived, name);
        if (it != extra_.end()) {
            require_shape(name, it->second, rows, cols);
            backend_.upload(out, it->second.data, out.bytes());
        }
        return out;
    }

  private:
    LayerWeights load_layer(int layer) {
        const std::string p = concat("blk.", layer, ".");
        LayerWeights l;
        load_norms(p, l);
        load_qkv(p, l.attn);
        l.attn.o = matrix(p + "attn_output.weight", c_.d_model, int64_t(c_.n_heads) * c_.head_dim);
        // Any architecture may have one here: converting folds the V bias into it.
        const bool required = arch_.linear_bias == Presence::required;
        l.attn.o_bias =
            vector(p + "attn_output.bias", c_.d_model, required ? Presence::required : Presence::optional);
        load_ffn(p, l);
        return l;
    }

    void load_norms(const std::string& p, LayerWeights& l) {
        if (arch_.norms == Norms::after) {
            l.attn_post_norm = norm(p + "post_attention_norm");
            l.ffn_post_norm = norm(p + "post_ffw_norm");
            return;
        }
        l.attn_norm = norm(p + "attn_norm");
        l.ffn_norm = arch_.norms == Norms::shared ? l.attn_norm : norm(p + "ffn_norm");
    }

    void load_qkv(const std::string& p, AttnWeights& a) {
        const int64_t q = int64_t(c_.n_heads) * c_.head_dim, kv = int64_t(c_.n_kv_heads) * c_.head_dim;
        if (arch_.qk_norm) {
            a.q_norm = vector(p + "attn_q_norm.weight", q, Presence::required);
            a.k_norm = vector(p + "attn_k_norm.weight", kv, Presence::required);
        }
        const Tensor weight = matrix(p + "attn_qkv.weight", q + 2 * kv, c_.d_model, arch_.fused_qkv);
        if (!weight) {
            a.q = matrix(p + "attn_q.weight", q, c_.d_model);
            a.k = matrix(p + "attn_k.weight", kv, c_.d_model);
            a.v = matrix(p + "attn_v.weight", kv, c_.d_model);
            a.q_bias = vector(p + "attn_q.bias", q, arch_.qkv_bias);
            a.k_bias = vector(p + "attn_k.bias", kv, arch_.qkv_bias);
            a.v_bias = vector(p + "attn_v.bias", kv, arch_.qkv_bias);
            return;
        }
        a.q = weight.rows_of(0, q);
        a.k = weight.rows_of(q, kv);
        a.v = weight.rows_of(q + kv, kv);
        if (const Tensor bias = vector(p + "attn_qkv.bias", q + 2 * kv, arch_.qkv_bias)) {
            a.q_bias = bias.cols_of(0, q);
            a.k_bias = bias.cols_of(q, kv);
            a.v_bias = bias.cols_of(q + kv, kv);
        }
    }

    void load_ffn(const std::string& p, LayerWeights& l) {
        if (arch_.fused_gate_up) {
            const Tensor both = matrix(p + "ffn_up.weight", 2 * int64_t(c_.d_ff), c_.d_model);
            l.gate = both.rows_of(0, c_.d_ff);
            l.up = both.rows_of(c_.d_ff, c_.d_ff);
        } else {
            l.up = matrix(p + "ffn_up.weight", c_.d_ff, c_.d_model);
            l.up_bias = vector(p + "ffn_up.bias", c_.d_ff, arch_.linear_bias);
            if (arch_.gated_ffn) {
                l.gate = matrix(p + "ffn_gate.weight", c_.d_ff, c_.d_model);
                l.gate_bias = vector(p + "ffn_gate.bias", c_.d_ff, arch_.linear_bias);
            }
        }
        l.down = matrix(p + "ffn_down.weight", c_.d_model, c_.d_ff);
        l.down_bias = vector(p + "ffn_down.bias", c_.d_model, arch_.linear_bias);
    }

    Norm norm(const std::string& name) {
        return {vector(name + ".weight", c_.d_model, Presence::required),
                arch_.norm == NormKind::layer ? vector(name + ".bias", c_.d_model, Presence::required)
                                              : Tensor{}};
    }

    Tensor matrix(const std::string& name, int64_t rows, int64_t cols,
                  Presence presence = Presence::required) {
        const Tensor* t = presence == Presence::never ? nullptr : find(name, presence);
        if (!t) return {};
        require_shape(name, *t, rows, cols);
        return backend_.native(t->dtype) ? in_place(*t) : unpacked(name, *t, DType::F16);
    }

    /// A norm's weight or a bias: f32.
    Tensor vector(const std::string& name, int64_t n, Presence presence) {
        const Tensor* t = presence == Presence::never ? nullptr : find(name, presence);
        if (!t) return {};
        require_shape(name, *t, 1, n);
        return t->dtype == DType::F32 ? in_place(*t) : unpacked(name, *t, DType::F32);
    }

    const Tensor* find(const std::string& name, Presence presence) {
        const auto it = file_.tensors().find(name);
        if (it != file_.tensors().end()) {
            used_.insert(name);
            return &it->second;
        }
        if (presence == Presence::required)
            fail(ErrorCode::format, file_.path(), ": tensor '", name, "' is missing (architecture '",
                 arch_.name, "' needs it)");
        return nullptr;
    }

    void require_shape(const std::string& name, const Tensor& t, int64_t rows, int64_t cols) const {
        if (t.rows != rows || t.cols != cols)
            fail(ErrorCode::format, file_.path(), ": tensor '", name, "' is [", t.rows, ", ", t.cols,
                 "], expected [", rows, ", ", cols, "] from the metadata");
    }

    Tensor in_place(const Tensor& t) {
        w_.mapped += t.bytes();
        return t;
    }

    Tensor own(DType dtype, int64_t rows, int64_t cols, MemoryKind kind, const std::string& name) {
        const Buffer buffer = backend_.alloc(kind, rows * row_bytes(dtype, cols), name.c_str());
        w_.owned.push_back(buffer);
        return Tensor(buffer.data.get(), dtype, rows, cols);
    }

    Tensor unpacked(const std::string& name, const Tensor& t, DType dtype) {
        const Tensor out = own(dtype, t.rows, t.cols, MemoryKind::weights, name);
        if (backend_.dry()) return out;
        const int64_t step = std::max<int64_t>(1, (1 << 20) / t.cols);
        std::vector<float> values(std::min(step, t.rows) * t.cols);
        std::vector<int32_t> ids(std::min(step, t.rows));
        for (int64_t first = 0; first < t.rows; first += step) {
            const int64_t n = std::min(step, t.rows - first);
            for (int64_t i = 0; i < n; ++i) ids[i] = int32_t(i);
            const Tensor rows(values.data(), DType::F32, n, t.cols), index(ids.data(), DType::I32, 1, n);
            backend_.gather(t.rows_of(first, n), index, rows);
            const Tensor to = out.rows_of(first, n);
            backend_.store(rows, {.base = to.data,
                                  .dtype = dtype,
                                  .width = int(t.cols),
                                  .row_bytes = to.stride,
                                  .slots = index});
        }
        return out;
    }

    /// A tensor we would not use may change what the model computes: say so instead of ignoring it.
    void refuse_unused() const {
        for (const auto& [name, tensor] : file_.tensors()) {
            const bool known = used_.count(name) || name.starts_with("rope_") ||
                               name.ends_with(".attn_kv.weight") || name.ends_with(".attn_vk.weight") ||
                               name.ends_with(".attn_rot_embd");
            if (!known)
                fail(ErrorCode::unsupported, file_.path(), ": tensor '", name,
                     "' is not part of architecture '", arch_.name, "' as slimrt knows it");
        }
    }

    const GgufFile& file_;
    const ModelConfig& c_;
    const Architecture& arch_;
    Backend& backend_;
    const ExtraTensors& extra_;
    std::set<std::string> used_;
    Weights w_;
};

}  // namespace

Weights load_weights(const GgufFile& file, const ModelConfig& config, Backend& backend,
                     const std::vector<const CacheMode*>& modes, const std::vector<AttnConfig>& attn,
                     const ExtraTensors& extra) {
    return Loader(file, config, backend, extra).load(modes, attn);
}

}  // namespace slimrt
