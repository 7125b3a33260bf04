#include "model/weights.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>

#include "core/error.h"
#include "model/architecture.h"
#include "model/cache_choice.h"

namespace slimrt {

AttnConfig attention_config(const ModelConfig& c, int layer) {
    return {.layer = layer,
            .d_model = c.d_model,
            .n_heads = c.n_heads,
            .n_kv_heads = c.n_kv_heads,
            .head_dim = c.head_dim,
            .rope = c.rope.n_rot > 0,
            .n_rot = c.rope.n_rot,
            .qk_norm_eps = c.architecture->qk_norm ? std::optional(c.norm_eps) : std::nullopt,
            .window = c.window,
            .scale = c.architecture->scaled_scores ? 1 / std::sqrt(float(c.head_dim)) : 1};
}

std::string block_prefix(const ModelConfig& c, int layer) {
    return concat(c.architecture->source == Source::none ? "blk." : "dec.blk.", layer, ".");
}

namespace {

class Loader final : public DerivedWeights {
  public:
    Loader(const GgufFile& file, const ModelConfig& config, Backend& backend, const ExtraTensors& extra,
           int64_t n_source)
        : file_(file),
          c_(config),
          arch_(*config.architecture),
          backend_(backend),
          extra_(extra),
          n_source_(n_source) {}

    Weights load(const CacheChoices& choices) {
        w_.token_embd = matrix("token_embd.weight", c_.n_vocab, c_.d_model);
        load_encoder();
        const std::string part = encoder_decoder() ? "dec." : "";
        if (arch_.positions == Positions::learned)
            w_.position_embd = matrix(part + "position_embd.weight", c_.n_ctx_train, c_.d_model);
        for (int layer = 0; layer < c_.n_layers; ++layer) {
            LayerWeights l = load_layer(block_prefix(c_, layer));
            load_cross(block_prefix(c_, layer), l);
            w_.layers.push_back(l);
            prepare(choices, layer);
        }
        if (arch_.positions == Positions::relative) load_relative_bias(part, choices.n_ctx, true, w_.layers);
        load_head(part);
        refuse_unused();
        return std::move(w_);
    }

    Tensor folded(int layer, const char* suffix, int64_t rows, int64_t cols) override {
        const Tensor out = folded_if_any(layer, suffix, rows, cols, true);
        if (!out)
            fail(ErrorCode::cache_unsupported, "tensor '", block_prefix(c_, layer), suffix,
                 "' is neither in the file nor given: fold the model first (slimrt convert --cache)");
        return out;
    }

    Tensor folded_if_any(int layer, const char* suffix, int64_t rows, int64_t cols, bool usual) override {
        const std::string name = block_prefix(c_, layer) + suffix;
        if (file_.tensors().count(name))
            return rows == 1 ? vector(name, cols, Presence::required) : matrix(name, rows, cols);
        const auto it = extra_.find(name);
        if (it == extra_.end() && !(usual && backend_.dry())) return {};
        const Tensor out = own(DType::F32, rows, cols, MemoryKind::derived, name);
        if (it != extra_.end()) {
            require_shape(name, it->second, rows, cols);
            backend_.upload(out, it->second.data, out.bytes());
        }
        return out;
    }

    std::vector<float> source_sizes() override {
        const Norm& last = w_.encoder.output_norm;
        std::vector<float> sizes(c_.d_model, 1), bias(c_.d_model, 0);
        if (backend_.dry()) return sizes;
        backend_.download(sizes.data(), last.weight, last.weight.bytes());
        if (last.bias) backend_.download(bias.data(), last.bias, last.bias.bytes());
        const float least = 1e-3f * std::abs(*std::max_element(sizes.begin(), sizes.end()));
        for (int i = 0; i < c_.d_model; ++i)
            sizes[i] = std::max({std::hypot(sizes[i], bias[i]), least, std::numeric_limits<float>::min()});
        return sizes;
    }

  private:
    bool encoder_decoder() const { return arch_.source != Source::none; }

    void prepare(const CacheChoices& choices, int layer) {
        const auto& [mode, config] = choices.layers[layer];
        mode->prepare(backend_, config, *this, w_.layers[layer].attn);
        if (choices.cross.mode)
            choices.cross.mode->prepare(backend_, choices.cross.of(layer), *this, w_.layers[layer].cross);
    }

    void load_head(const std::string& part) {
        w_.output_norm = norm(part + "output_norm");
        w_.output = matrix("output.weight", c_.n_vocab, c_.d_model, Presence::optional);
        w_.output_bias = vector("output.bias", c_.n_vocab, arch_.output_bias);
        if (w_.output) return;
        w_.output = w_.token_embd;  // tied
        if (arch_.scaled_tied_output) w_.output_scale = 1 / std::sqrt(float(c_.d_model));
    }

    void load_encoder() {
        if (!encoder_decoder()) return;
        EncoderWeights& e = w_.encoder;
        int64_t inputs = c_.n_inputs;
        for (const Convolution& conv : arch_.convolutions) {
            const std::string name = concat("enc.", conv.name);
            const int64_t channels = int64_t(conv.channels) * c_.d_model;
            e.convolutions.push_back({matrix(name + ".weight", channels, conv.width * inputs)});
            if (conv.bias) e.convolutions.back().bias = vector(name + ".bias", channels, Presence::required);
            if (conv.normed)
                e.convolutions.back().norm = {vector("enc.conv_norm.weight", channels, Presence::required),
                                              vector("enc.conv_norm.bias", channels, Presence::required)};
            inputs = channels;
        }
        if (arch_.source_positions)
            e.position_embd = matrix("enc.position_embd.weight", c_.n_source_train, c_.d_model);
        for (int layer = 0; layer < c_.n_encoder_layers; ++layer)
            e.layers.push_back(load_layer(concat("enc.blk.", layer, ".")));
        if (arch_.positions == Positions::relative) load_relative_bias("enc.", n_source_, false, e.layers);
        e.output_norm = norm("enc.output_norm");
    }

    /// The first layer's serves the others, where they have none. Expanded from buckets to distances, so that
    /// the biases of neighbouring rows are neighbours.
    void load_relative_bias(const std::string& part, int64_t n, bool causal,
                            std::vector<LayerWeights>& layers) {
        const int64_t n_distances = causal ? n : 2 * n - 1;
        for (size_t i = 0; i < layers.size(); ++i) {
            const std::string name = concat(part, "blk.", i, ".attn_rel_b.weight");
            const Presence presence = i == 0 ? Presence::required : Presence::optional;
            const Tensor* buckets = find(name, presence);
            if (!buckets) {
                layers[i].attn.relative_bias = layers[0].attn.relative_bias;
                continue;
            }
            require_shape(name, *buckets, c_.relative_buckets, c_.n_heads);
            const Tensor values =
                buckets->dtype == DType::F32 ? *buckets : unpacked(name, *buckets, DType::F32);
            const Tensor bias = own(DType::F32, c_.n_heads, n_distances, MemoryKind::derived, name);
            layers[i].attn.relative_bias = bias;
            if (backend_.dry()) continue;
            std::vector<float> from(values.rows * values.cols), to(n_distances);
            backend_.download(from.data(), values, values.bytes());
            for (int head = 0; head < c_.n_heads; ++head) {
                for (int64_t j = 0; j < n_distances; ++j)
                    to[j] = from[relative_bucket(c_, j - (n - 1), causal) * c_.n_heads + head];
                backend_.upload(bias.rows_of(head, 1), to.data(), to.size() * sizeof(float));
            }
        }
    }

    LayerWeights load_layer(const std::string& p) {
        LayerWeights l;
        load_norms(p, l);
        load_qkv(p, "attn", l.attn);
        load_ffn(p, l);
        return l;
    }

    void load_cross(const std::string& p, LayerWeights& l) {
        if (!encoder_decoder()) return;
        l.cross_norm = norm(p + "cross_attn_norm");
        load_qkv(p, "cross_attn", l.cross);
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

    void load_qkv(const std::string& block, const char* what, AttnWeights& a) {
        const int64_t q = int64_t(c_.n_heads) * c_.head_dim, kv = int64_t(c_.n_kv_heads) * c_.head_dim;
        const std::string p = block + what, o = p + (encoder_decoder() ? "_o" : "_output");
        a.o = matrix(o + ".weight", c_.d_model, q);
        // Any architecture may have one here: converting folds the V bias into it.
        const bool required = arch_.linear_bias == Presence::required && arch_.attn_output_bias;
        a.o_bias = vector(o + ".bias", c_.d_model, required ? Presence::required : Presence::optional);
        if (arch_.qk_norm) {
            a.q_norm = vector(p + "_q_norm.weight", q, Presence::required);
            a.k_norm = vector(p + "_k_norm.weight", kv, Presence::required);
        }
        const Tensor weight = matrix(p + "_qkv.weight", q + 2 * kv, c_.d_model, arch_.fused_qkv);
        if (!weight) {
            a.q = matrix(p + "_q.weight", q, c_.d_model);
            a.k = matrix(p + "_k.weight", kv, c_.d_model);
            a.v = matrix(p + "_v.weight", kv, c_.d_model);
            a.q_bias = vector(p + "_q.bias", q, arch_.qkv_bias);
            a.k_bias = vector(p + "_k.bias", kv, arch_.k_bias ? arch_.qkv_bias : Presence::never);
            a.v_bias = vector(p + "_v.bias", kv, arch_.qkv_bias);
            return;
        }
        a.q = weight.rows_of(0, q);
        a.k = weight.rows_of(q, kv);
        a.v = weight.rows_of(q + kv, kv);
        if (const Tensor bias = vector(p + "_qkv.bias", q + 2 * kv, arch_.qkv_bias)) {
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
            l.gate = matrix(p + "ffn_gate.weight", c_.d_ff, c_.d_model, arch_.gated_ffn);
            if (l.gate) l.gate_bias = vector(p + "ffn_gate.bias", c_.d_ff, arch_.linear_bias);
        }
        l.down = matrix(p + "ffn_down.weight", c_.d_model, c_.d_ff);
        l.down_bias = vector(p + "ffn_down.bias", c_.d_model, arch_.linear_bias);
    }

    Norm norm(const std::string& name) {
        return {vector(name + ".weight", c_.d_model, Presence::required),
                arch_.norm == NormKind::layer && arch_.norm_bias
                    ? vector(name + ".bias", c_.d_model, Presence::required)
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

    /// Where the file is mapped; on a device a copy.
    Tensor in_place(const Tensor& t) {
        if (backend_.on_host()) {
            w_.mapped += t.bytes();
            return t;
        }
        const Tensor out = own(t.dtype, t.rows, t.cols, MemoryKind::weights, "a weight");
        backend_.upload(out, t.data, t.bytes());
        return out;
    }

    Tensor own(DType dtype, int64_t rows, int64_t cols, MemoryKind kind, const std::string& name) {
        const Buffer buffer = backend_.alloc(kind, rows * row_bytes(dtype, cols), name.c_str());
        w_.owned.push_back(buffer);
        return Tensor(buffer.data.get(), dtype, rows, cols);
    }

    /// A few rows at a time: raw, as f32, as they are kept.
    Tensor unpacked(const std::string& name, const Tensor& t, DType dtype) {
        const Tensor out = own(dtype, t.rows, t.cols, MemoryKind::weights, name);
        if (backend_.dry()) return out;
        const int64_t step = std::clamp<int64_t>((1 << 20) / t.cols, 1, t.rows);
        std::vector<int32_t> ids(step);
        std::iota(ids.begin(), ids.end(), 0);
        Scratch scratch(backend_, step * (t.stride + t.cols * sizeof(float) + sizeof(int32_t)) + (1 << 10));
        const Tensor raw = scratch.take(t.dtype, step, t.cols), values = scratch.f32(step, t.cols);
        const Tensor index = scratch.i32(step);
        backend_.upload(index, ids.data(), index.bytes());
        for (int64_t first = 0; first < t.rows; first += step) {
            const int64_t n = std::min(step, t.rows - first);
            const Tensor to = out.rows_of(first, n), some = index.cols_of(0, n);
            backend_.upload(raw, t.row(first), n * t.stride);
            backend_.gather(raw, some, values.rows_of(0, n));
            backend_.store(values.rows_of(0, n), {.base = to.data,
                                                  .dtype = dtype,
                                                  .width = int(t.cols),
                                                  .row_bytes = to.stride,
                                                  .slots = some});
        }
        return out;
    }

    /// Of a cache mode, which may be another than the one in use.
    static bool is_folded(const std::string& name) {
        return name.ends_with("attn_kv.weight") || name.ends_with(".attn_vk.weight") ||
               name.find(".attn_kr_") != std::string::npos || name.find(".attn_xr_") != std::string::npos ||
               name.find(".cross_attn_k1_") != std::string::npos;
    }

    /// A tensor we would not use may change what the model computes: say so instead of ignoring it.
    void refuse_unused() const {
        for (const auto& [name, tensor] : file_.tensors()) {
            const bool known = used_.count(name) || name.starts_with("rope_") || is_folded(name) ||
                               name.ends_with(".attn_rot_embd") || name.starts_with("slimrt.");
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
    int64_t n_source_;
    std::set<std::string> used_;
    Weights w_;
};

}  // namespace

Weights load_weights(const GgufFile& file, const ModelConfig& config, Backend& backend,
                     const CacheChoices& choices, const ExtraTensors& extra) {
    return Loader(file, config, backend, extra, choices.n_source).load(choices);
}

}  // namespace slimrt
