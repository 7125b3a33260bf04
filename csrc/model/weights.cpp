#include "model/weights.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cache/prepare.h"
#include "core/error.h"
#include "model/cache_choice.h"
#include "model/ffn.h"
#include "model/file_tensors.h"
#include "model/latent.h"
#include "model/layer_embedding.h"
#include "model/position_bias.h"
#include "model/weight_memory.h"

namespace slimrt {

std::string block_prefix(const ModelConfig& c, int layer) {
    return concat(c.architecture->encoder == EncoderKind::none ? "blk." : "dec.blk.", layer, ".");
}

namespace {

class Loader final : public TensorSource {
  public:
    Loader(const GgufFile& file, const ModelConfig& config, std::span<Backend* const> backends,
           const ExtraTensors& extra, int64_t n_source)
        : file_(file),
          tensors_(file, config),
          c_(config),
          arch_(*config.architecture),
          backends_(backends),
          backend_(backends[0]),
          extra_(extra),
          n_source_(n_source) {}

    Weights load(const CacheChoices& choices) {
        w_.token_embd = matrix("token_embd.weight", c_.n_vocab, c_.d_model);
        load_layer_embeddings(*this, c_, w_);
        load_encoder();
        if (c_.n_layers > 0) load_decoder(choices);
        tensors_.refuse_unused();
        return std::move(w_);
    }

    void load_decoder(const CacheChoices& choices) {
        const std::string part = encoder_decoder() ? "dec." : "";
        w_.embd_norm = embedding_norm(part);
        if (arch_.positions == Positions::learned)
            w_.position_embd = matrix(part + "position_embd.weight", c_.n_ctx_train, c_.d_model);
        for (int layer = 0; layer < c_.n_layers; ++layer) {
            use(*backends_[layer]);
            LayerWeights l = load_layer(attention_config(c_, layer), block_prefix(c_, layer),
                                        choices.layers[layer].owns());
            load_cross(attention_config(c_, layer, true), block_prefix(c_, layer), l);
            w_.layers.push_back(l);
            w_.layers.back().attn_prepared = prepare(choices.layers[layer], &LayerWeights::attn);
            if (!choices.cross.empty())
                w_.layers.back().cross_prepared = prepare(choices.cross[layer], &LayerWeights::cross);
        }
        if (arch_.positions == Positions::relative) load_relative_bias(part, choices.n_ctx, true, w_.layers);
        if (arch_.positions == Positions::alibi) load_alibi(choices.n_ctx);
        load_head(part);
    }

    Tensor matrix(const std::string& name, int64_t rows, int64_t cols, Presence presence = Presence::required,
                  int64_t part = 0) override {
        const Tensor* t = tensors_.find(name, presence);
        if (!t) return {};
        tensors_.require_shape(name, *t, rows, cols);
        const auto native = [this](DType dtype) { return backend_->native(dtype); };
        const Tensor held = memory_.hold(name, *t, held_type(file_, name, part ? part : rows, native));
        if (held.data != t->data && !backend_->dry()) file_.let_go(*t);
        w_.matrices[name] = held;
        return held;
    }

    Tensor vectors(const std::string& name, int64_t rows, int64_t n, Presence presence) override {
        const Tensor* t = tensors_.find(name, presence);
        if (!t) return {};
        tensors_.require_shape(name, *t, rows, n);
        return t->dtype == DType::F32 ? memory_.in_place(*t) : memory_.unpacked(name, *t, DType::F32);
    }

  private:
    void use(Backend& backend) {
        backend_ = &backend;
        memory_.set_backend(backend);
    }

    bool encoder_decoder() const { return arch_.encoder != EncoderKind::none; }

    /// What a layer's mode derives from the weights; a reader gets its owner's. Folds V's bias into the
    /// output's where rows do not hold it.
    std::shared_ptr<const Prepared> prepare(const LayerChoice& choice, AttnWeights LayerWeights::* part) {
        const AttnConfig& c = choice.config;
        AttnWeights& w = w_.layers[c.layer].*part;
        const Tensor v_bias = c.cross ? w.v_bias : w_.layers[choice.owner].attn.v_bias;
        if (!choice.mode->keeps_v_bias()) w.o_bias = fold_v_bias(*backend_, c, w, v_bias, w_.owned);
        if (!c.cross && !choice.owns()) return w_.layers[choice.owner].attn_prepared;
        std::map<std::string, Tensor> folded;
        for (const Fold& fold : choice.mode->folds(c))
            folded[fold.suffix] =
                fold.scale ? halved_fold(c.layer, fold, &folded[fold.scale]) : load_fold(c.layer, fold);
        return choice.mode->prepare(*backend_, {c, w, folded, encoder_channel_sizes_});
    }

    /// A folded tensor from the file or the caller; none where it is not used, or optional and missing.
    Tensor load_fold(int layer, const Fold& fold) {
        const auto& [suffix, rows, cols, required, planned, scale, type, exact, used] = fold;
        if (!used) return {};
        const std::string name = block_prefix(c_, layer) + suffix;
        const bool floats = rows == 1 || (exact && backend_->rounds_rows());
        if (tensors_.has(name))
            return floats ? vectors(name, rows, cols, Presence::required) : matrix(name, rows, cols);
        const Tensor* const given = given_fold(name, fold);
        if (!given && !required && !(planned && backend_->dry())) return {};
        if (given && floats && given->dtype != DType::F32)
            return memory_.unpacked(name, *given, DType::F32, MemoryKind::derived);
        const DType held = floats ? DType::F32 : given ? given->dtype : type;
        const Tensor out = memory_.own(held, rows, cols, MemoryKind::derived, name);
        if (given) backend_->upload(out, given->data, out.bytes());
        return out;
    }

    /// The same of a required matrix, in f16 with a scale for each row.
    Tensor halved_fold(int layer, const Fold& fold, Tensor* scale) {
        const std::string name = block_prefix(c_, layer) + fold.suffix;
        const bool stored = tensors_.has(name);
        const Tensor* const values =
            stored ? tensors_.find(name, Presence::required) : given_fold(name, fold);
        if (stored) tensors_.require_shape(name, *values, fold.rows, fold.cols);
        if (values && values->dtype != DType::F32) return load_fold(layer, fold);
        const Tensor held = memory_.halved(name, fold.rows, fold.cols, values, scale);
        if (!stored) return held;
        if (!backend_->dry()) file_.let_go(*values);
        return w_.matrices[name] = held;
    }

    /// A folded tensor that the caller gave; nullptr if it is optional, or planned, and missing.
    const Tensor* given_fold(const std::string& name, const Fold& fold) const {
        const auto it = extra_.find(name);
        if (it != extra_.end()) {
            tensors_.require_shape(name, it->second, fold.rows, fold.cols);
            return &it->second;
        }
        if (fold.required && !(fold.planned && backend_->dry()))
            fail(ErrorCode::cache_unsupported, "tensor '", name,
                 "' is neither in the file nor given: fold the model first (slimrt convert --cache)");
        return nullptr;
    }

    /// Approximate size of each channel of the encoder's output, by its last norm's weight and bias; ones on
    /// a dry backend.
    std::vector<float> encoder_channel_sizes() {
        const EncoderWeights& e = w_.encoder;
        const Norm& last = e.output_norm.present ? e.output_norm : e.layers.back().ffn_sum_norm;
        std::vector<float> sizes(c_.d_model, 1), bias(c_.d_model, 0);
        if (backend_->dry()) return sizes;
        backend_->download(sizes.data(), last.weight, last.weight.bytes());
        if (last.bias) backend_->download(bias.data(), last.bias, last.bias.bytes());
        const float least = 1e-3f * std::abs(*std::max_element(sizes.begin(), sizes.end()));
        for (int i = 0; i < c_.d_model; ++i)
            sizes[i] = std::max({std::hypot(sizes[i], bias[i]), least, std::numeric_limits<float>::min()});
        return sizes;
    }

    void load_head(const std::string& part) {
        w_.output_norm = output_norm(part);
        w_.output = matrix("output.weight", c_.n_vocab, c_.d_model, Presence::optional);
        w_.output_bias = vector("output.bias", c_.n_vocab, arch_.output_bias);
        w_.output_scale = c_.output_scale;
        if (w_.output) return;
        w_.output = w_.token_embd;  // tied
        if (backend_ != backends_[0]) w_.output = matrix("token_embd.weight", c_.n_vocab, c_.d_model);
        if (arch_.scaled_tied_output) w_.output_scale /= std::sqrt(float(c_.d_model));
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
        if (arch_.encoder_positions)
            e.position_embd = matrix("enc.position_embd.weight", c_.n_source_train, c_.d_model);
        e.embd_norm = embedding_norm("enc.");
        for (int layer = 0; layer < c_.n_encoder_layers; ++layer) {
            const std::string p = concat("enc.blk.", layer, ".");
            e.layers.push_back(load_layer(attention_config(c_, 0), p));
            if (arch_.encoder != EncoderKind::series) continue;
            e.layers.back().group_norm = norm(p + "group_attn_norm");
            load_qkv(attention_config(c_, 0), p, "group_attn", e.layers.back().group);
        }
        if (arch_.positions == Positions::relative) load_relative_bias("enc.", n_source_, false, e.layers);
        e.output_norm = output_norm("enc.");
        encoder_channel_sizes_ = encoder_channel_sizes();
    }

    /// Layers without a table use the first layer's. Expanded from buckets to distances, so that the biases
    /// of neighbouring rows are neighbours in memory.
    void load_relative_bias(const std::string& part, int64_t n, bool causal,
                            std::vector<LayerWeights>& layers) {
        const int64_t n_distances = causal ? n : 2 * n - 1;
        for (size_t i = 0; i < layers.size(); ++i) {
            const std::string name = concat(part, "blk.", i, ".attn_rel_b.weight");
            const Presence presence = i == 0 ? Presence::required : Presence::optional;
            const Tensor* buckets = tensors_.find(name, presence);
            if (!buckets) {
                layers[i].attn.relative_bias = layers[0].attn.relative_bias;
                continue;
            }
            tensors_.require_shape(name, *buckets, c_.relative_buckets, c_.n_heads);
            const Tensor values =
                buckets->dtype == DType::F32 ? *buckets : memory_.unpacked(name, *buckets, DType::F32);
            const Tensor bias = memory_.own(DType::F32, c_.n_heads, n_distances, MemoryKind::derived, name);
            layers[i].attn.relative_bias = bias;
            fill_relative_bias(*backend_, c_, values, bias, n, causal);
        }
    }

    /// A table as of load_relative_bias(), one for all layers of a backend.
    void load_alibi(int64_t n) {
        for (int layer = 0; layer < c_.n_layers; ++layer) {
            Tensor& bias = w_.layers[layer].attn.relative_bias;
            if (layer > 0 && backends_[layer] == backends_[layer - 1]) {
                bias = w_.layers[layer - 1].attn.relative_bias;
                continue;
            }
            use(*backends_[layer]);
            bias = memory_.own(DType::F32, c_.n_heads, n, MemoryKind::derived, "ALiBi");
            fill_alibi(*backend_, c_, bias);
        }
    }

    LayerWeights load_layer(const AttnConfig& c, const std::string& p, bool owns_rows = true) {
        LayerWeights l;
        load_norms(c, p, l);
        if (arch_.latent)
            load_output(c, p + "attn", l.attn), load_latent(*this, c_, p, l.attn);
        else if (owns_rows)
            load_qkv(c, p, "attn", l.attn);
        else
            load_q(c, p, l.attn);
        if (c.sinks) l.attn.sinks = vector(p + "attn_sinks.weight", c.n_heads, Presence::required);
        l.d_ff = c_.layers[c.layer].d_ff;
        l.output_scale = layer_scale(p + "layer_output_scale.weight");
        arch_.ffn->load(*this, c_, p, l);
        load_layer_embedding(*this, c_, p, l);
        return l;
    }

    float layer_scale(const std::string& name) {
        const Tensor* t = tensors_.find(name, arch_.layer_scale);
        if (!t) return 1;
        tensors_.require_shape(name, *t, 1, 1);
        if (t->dtype != DType::F32 || !std::isfinite(t->f32()[0]))
            fail(ErrorCode::format, file_.path(), ": tensor '", name, "' does not hold a number in f32");
        return t->f32()[0];
    }

    void load_cross(const AttnConfig& c, const std::string& p, LayerWeights& l) {
        if (!encoder_decoder()) return;
        if (arch_.norms == Norms::sums)
            l.cross_sum_norm = norm(p + "cross_attn_output_norm");
        else
            l.cross_norm = norm(p + "cross_attn_norm");
        load_qkv(c, p, "cross_attn", l.cross);
    }

    void load_norms(const AttnConfig& c, const std::string& p, LayerWeights& l) {
        if (arch_.norms == Norms::after || arch_.norms == Norms::both) {
            l.attn_post_norm = norm(p + "post_attention_norm");
            l.ffn_post_norm = norm(p + "post_ffw_norm");
        }
        if (arch_.sub_norms) {
            l.attn_sub_norm = norm(p + "attn_sub_norm", c.q_width());
            l.ffn_sub_norm = norm(p + "ffn_sub_norm", c_.d_ff);
        }
        if (arch_.norms == Norms::sums) {
            l.attn_sum_norm = norm(p + "attn_output_norm");
            l.ffn_sum_norm = norm(p + "layer_output_norm");
        }
        if (arch_.norms == Norms::after || arch_.norms == Norms::sums) return;
        l.attn_norm = norm(p + "attn_norm");
        l.ffn_norm = arch_.norms == Norms::shared ? l.attn_norm : norm(p + arch_.ffn_norm);
    }

    /// `what`: "attn", "cross_attn" or "group_attn".
    void load_qkv(const AttnConfig& c, const std::string& block, const char* what, AttnWeights& a) {
        const int64_t q = c.q_width(), kv = c.kv_width();
        const std::string p = block + what;
        load_output(c, p, a);
        a.q_norm = qk_norm(p + "_q_norm.weight", c.norms_heads ? c.head_dim : q);
        a.k_norm = qk_norm(p + "_k_norm.weight", c.norm_width());
        const Tensor weight = matrix(p + "_qkv.weight", q + 2 * kv, c_.d_model, arch_.fused_qkv, c.head_dim);
        if (!weight) {
            a.q = matrix(p + "_q.weight", q, c_.d_model, Presence::required, c.head_dim);
            a.k = matrix(p + "_k.weight", kv, c_.d_model, Presence::required, c.head_dim);
            a.v = c.v_is_k ? a.k : matrix(p + "_v.weight", kv, c_.d_model, Presence::required, c.head_dim);
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

    /// With a norm of each head, all heads share its weight.
    Tensor qk_norm(const std::string& name, int64_t width) {
        return vector(name, width, arch_.qk_norm == QkNorm::none ? Presence::never : Presence::required);
    }

    void load_output(const AttnConfig& c, const std::string& p, AttnWeights& a) {
        const std::string o = p + (encoder_decoder() ? "_o" : "_output");
        a.o = matrix(o + ".weight", c_.d_model, c.value_width());
        // Optional in any architecture: converting folds V's bias into it.
        const bool required = arch_.linear_bias == Presence::required && arch_.attn_output_bias;
        a.o_bias = vector(o + ".bias", c_.d_model, required ? Presence::required : Presence::optional);
    }

    /// For a layer that reads another's rows: it needs no K and V, and a file that has them is not refused.
    void load_q(const AttnConfig& c, const std::string& block, AttnWeights& a) {
        const std::string p = block + "attn";
        const int64_t q = c.q_width(), all = q + 2 * c.kv_width();
        load_output(c, p, a);
        a.q_norm = qk_norm(p + "_q_norm.weight", c.norms_heads ? c.head_dim : q);
        for (const char* unread : {"_k.weight", "_v.weight", "_k.bias", "_v.bias", "_k_norm.weight"})
            tensors_.find(p + unread, Presence::optional);
        if (tensors_.has(p + "_qkv.weight")) {
            a.q = matrix(p + "_qkv.weight", all, c_.d_model, arch_.fused_qkv, c.head_dim).rows_of(0, q);
            const Tensor bias = vector(p + "_qkv.bias", all, arch_.qkv_bias);
            if (bias) a.q_bias = bias.cols_of(0, q);
            return;
        }
        a.q = matrix(p + "_q.weight", q, c_.d_model);
        a.q_bias = vector(p + "_q.bias", q, arch_.qkv_bias);
    }

    Norm embedding_norm(const std::string& part) {
        const std::string name = part + "token_embd_norm";
        const bool there = arch_.embedding_norm == Presence::required ||
                           (arch_.embedding_norm == Presence::optional && tensors_.has(name + ".weight"));
        return there ? norm(name) : Norm{};
    }

    Norm output_norm(const std::string& part) {
        return arch_.norms == Norms::sums ? Norm{} : norm(part + "output_norm");
    }

    Norm norm(const std::string& name) { return norm(name, c_.d_model); }
    Norm norm(const std::string& name, int64_t width) {
        const bool biased = arch_.norm == NormKind::layer && arch_.norm_bias;
        const auto presence = [](bool there) { return there ? Presence::required : Presence::never; };
        return {vector(name + ".weight", width, presence(arch_.norm_weight)),
                vector(name + ".bias", width, presence(biased)), true};
    }

    const GgufFile& file_;
    FileTensors tensors_;
    const ModelConfig& c_;
    const Architecture& arch_;
    std::span<Backend* const> backends_;  // by layer
    Backend* backend_;                    // of the tensors that are loaded now
    const ExtraTensors& extra_;
    int64_t n_source_;
    std::vector<float> encoder_channel_sizes_;  // with an encoder
    Weights w_;
    WeightMemory memory_{*backend_, w_};
};

}  // namespace

Weights load_weights(const GgufFile& file, const ModelConfig& config, std::span<Backend* const> backends,
                     const CacheChoices& choices, const ExtraTensors& extra) {
    return Loader(file, config, backends, extra, choices.n_source).load(choices);
}

}  // namespace slimrt
