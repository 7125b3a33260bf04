#include "model/config.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "model/architecture.h"

namespace slimrt {
namespace {

const Architecture& find_architecture(const GgufFile& file) {
    if (file.string("general.type", "model") == "adapter")
        fail(ErrorCode::format, file.path(), ": is no model but an adapter: slimrt convert MODEL --lora ",
             file.path(), " -o OUT merges it into its model");
    const std::string name = file.string("general.architecture");
    std::string known;
    for (const Architecture* a : architectures()) {
        if (name == a->name) return *a;
        known += concat(known.empty() ? "" : ", ", a->name);
    }
    const std::string why = why_refused(name);
    fail(ErrorCode::unsupported, file.path(), ": architecture '", name, "' is not supported",
         why.empty() ? "" : ": ", why, "; supported are: ", known);
}

Activation read_activation(const GgufFile& file, Activation usual) {
    if (!file.has("slimrt.activation")) return usual;
    return require_activation(file.string("slimrt.activation"), file.path() + ": ");
}

RopeConfig read_rope(const GgufFile& file, const std::string& prefix, const ModelConfig& c) {
    RopeConfig r;
    int head_dim = c.head_dim;
    for (const LayerConfig& layer : c.layers)
        if (layer.window == 0) head_dim = layer.head_dim;
    r.n_rot = int(file.integer(prefix + "rope.dimension_count", 2, head_dim, head_dim));
    if (r.n_rot % 2)
        fail(ErrorCode::format, file.path(), ": ", prefix, "rope.dimension_count is odd: ", r.n_rot);
    if (r.n_rot != head_dim && !c.architecture->partial_rotary)
        fail(ErrorCode::unsupported, file.path(), ": partial rotary embedding (", r.n_rot, " of ", head_dim,
             " dimensions) is not supported by architecture '", c.architecture->name, "'");
    r.base = file.number(prefix + "rope.freq_base", 10000.0);
    // Old files say only rope.scale_linear.
    const double old_factor = file.number(prefix + "rope.scale_linear", 1.0);
    r.factor = file.number(prefix + "rope.scaling.factor", old_factor);
    const bool longrope = file.tensors().count("rope_factors_long.weight") > 0;
    const std::string usual = longrope ? "longrope" : r.factor != 1 ? "linear" : "none";
    const std::string type = file.string(prefix + "rope.scaling.type", usual);
    if (type == "linear")
        r.scaling = RopeScaling::linear;
    else if (type == "yarn")
        r.scaling = RopeScaling::yarn;
    else if (type == "longrope")
        r.scaling = RopeScaling::longrope;
    else if (type != "none")
        fail(ErrorCode::unsupported, file.path(), ": ", prefix, "rope.scaling.type '", type,
             "' is not supported; supported are: none, linear, yarn, longrope");
    if (!(r.base > 0) || !(r.factor > 0))
        fail(ErrorCode::format, file.path(), ": ", prefix, "rope.freq_base and factor must be positive");
    if (longrope && (r.scaling != RopeScaling::longrope || r.factor != 1))
        fail(ErrorCode::unsupported, file.path(), ": tensor 'rope_factors_long.weight' beside ", prefix,
             "rope.scaling.type '", type, "' and a factor of ", r.factor, " is not supported");
    r.n_ctx_orig = file.integer(prefix + "rope.scaling.original_context_length", 1, 1 << 30, c.n_ctx_train);
    // transformers' attention_factor, all of the magnitude; or DeepSeek's attn_factor, which undoes what is
    // usual and which transformers does not read.
    const double whole = type == "yarn" ? file.number(prefix + "rope.scaling.yarn_attn_factor", 0.0) : 0;
    const double usual_factor = 1 + 0.1 * std::log(std::max(r.factor, 1.0));
    const bool undoes = std::abs(whole * usual_factor - 1) < 1e-3;
    r.attn_factor = file.number(prefix + "rope.scaling.attn_factor", undoes ? 0 : whole / usual_factor);
    r.beta_fast = file.number(prefix + "rope.scaling.yarn_beta_fast", 32.0);
    r.beta_slow = file.number(prefix + "rope.scaling.yarn_beta_slow", 1.0);
    return r;
}

/// Rows of the embedding: one for each token, and perhaps some that no text has.
int read_vocab(const GgufFile& file) {
    const auto it = file.tensors().find("token_embd.weight");
    if (it == file.tensors().end())
        fail(ErrorCode::format, file.path(), ": tensor 'token_embd.weight' is missing",
             file.tensors().empty() ? " (the file holds a vocabulary only)" : "");
    const int64_t rows = it->second.rows;
    if (rows > (1 << 26)) fail(ErrorCode::format, file.path(), ": a vocabulary of ", rows);
    const auto key = file.metadata().find("tokenizer.ggml.tokens");
    const auto* tokens = key == file.metadata().end() ? nullptr : std::get_if<GgufArray>(&key->second);
    if (tokens && tokens->count > uint64_t(rows))
        fail(ErrorCode::format, file.path(), ": tensor 'token_embd.weight' has ", rows,
             " rows, fewer than the ", tokens->count, " tokens of tokenizer.ggml.tokens");
    return int(rows);
}

/// How many layers of multi-token prediction (MTP) follow the others. If one of them is an ordinary layer,
/// the file is refused, since that layer would be dropped.
int read_mtp_layers(const GgufFile& file, const std::string& prefix, int n_layers) {
    const std::string key = prefix + "nextn_predict_layers";
    const int n = int(file.integer(key, 0, n_layers - 1, 0));
    for (int layer = n_layers - n; layer < n_layers; ++layer) {
        const std::string block = concat("blk.", layer, "."), name = block + "nextn.eh_proj.weight";
        const auto first = file.tensors().lower_bound(block);  // files may omit such a layer altogether
        const bool there = first != file.tensors().end() && first->first.starts_with(block);
        if (there && !file.tensors().count(name))
            fail(ErrorCode::format, file.path(), ": key '", key, "' is ", n, ", and tensor '", name,
                 "' of such a layer is missing: convert the model again with current tools");
    }
    return n;
}

/// With an encoder: how many layers it has, the width of its input and the rows of its output.
void read_encoder(const GgufFile& file, const std::string& prefix, ModelConfig& c) {
    const Architecture& a = *c.architecture;
    if (a.encoder == EncoderKind::none) return;
    c.n_encoder_layers = c.n_layers;
    const bool alone = a.encoder == EncoderKind::series;
    c.n_layers = alone ? 0 : int(file.integer(prefix + "decoder_block_count", 1, 4096, c.n_layers));
    c.decoder_start = int(file.integer(prefix + "decoder_start_token_id", 0, c.n_vocab - 1, 0));
    if (a.encoder == EncoderKind::mel) c.n_inputs = int(file.integer(prefix + "mel_bins", 1, 4096, 80));
    if (a.encoder == EncoderKind::audio) c.n_inputs = 1;
    constexpr int64_t kHalfMinute = 1249;  // rows that Moonshine's convolutions make of 30 s
    const int64_t usual = a.encoder == EncoderKind::audio ? kHalfMinute
                          : a.encoder == EncoderKind::mel ? 1500
                                                          : 512;
    c.n_source_train = file.integer(prefix + "encoder.context_length", 1, 1 << 24, usual);
    if (a.positions != Positions::relative) return;
    c.relative_buckets = int(file.integer(prefix + "attention.relative_buckets_count", 4, 1 << 16));
    c.relative_distance = int(file.integer(prefix + "attention.relative_max_distance", 2, 1 << 24, 128));
    if (c.relative_buckets % 4 || c.relative_distance <= c.relative_buckets / 2)
        fail(ErrorCode::format, file.path(), ": ", prefix, "attention.relative_buckets_count ",
             c.relative_buckets, " and relative_max_distance ", c.relative_distance, " do not go together");
}

/// Checks what the architecture's configure() read.
void require_sane(const GgufFile& file, const ModelConfig& c) {
    for (const float scale :
         {c.embedding_scale, c.residual_scale, c.score_scale, c.output_scale, c.alibi_bias})
        if (!(scale > 0) || !std::isfinite(scale))
            fail(ErrorCode::format, file.path(), ": a scale in the metadata is ", scale,
                 ", not a positive number");
    if (!(c.temperature_scale >= 0) || !std::isfinite(c.temperature_scale))
        fail(ErrorCode::format, file.path(), ": attention.temperature_scale is ", c.temperature_scale,
             ", not a positive number");
    if (c.latent && c.ropes[0].n_rot >= c.head_dim)
        fail(ErrorCode::format, file.path(), ": ", c.ropes[0].n_rot, " columns of a head rotate, and it has ",
             c.head_dim, ": latent attention needs some that do not");
    if (c.latent && c.temperature_scale > 0 && c.head_dim % 2)
        fail(ErrorCode::unsupported, file.path(), ": attention.temperature_scale with heads of ", c.head_dim,
             " columns, an odd number, is not supported in latent attention");
    if (!(c.clamp_kqv >= 0) || !std::isfinite(c.clamp_kqv))
        fail(ErrorCode::format, file.path(), ": attention.clamp_kqv is ", c.clamp_kqv,
             ", not a positive number");
}

/// Soft caps of scores and logits, and attention sinks, in any decoder whose file has them.
void read_caps(const GgufFile& file, const std::string& prefix, ModelConfig& c) {
    const auto read = [&](const char* key, float usual) {
        const auto value = float(file.number(prefix + key, usual));
        if (!(value >= 0) || !std::isfinite(value))
            fail(ErrorCode::format, file.path(), ": ", prefix, key, " is ", value, ", not a positive number");
        if (value > 0 && c.architecture->encoder != EncoderKind::none)
            fail(ErrorCode::unsupported, file.path(), ": ", prefix, key,
                 " is not supported in an encoder-decoder");
        return value;
    };
    c.score_cap = read("attn_logit_softcapping", c.architecture->usual_score_cap);
    c.logit_cap = read("final_logit_softcapping", c.architecture->usual_logit_cap);
    c.sinks = file.tensors().count("blk.0.attn_sinks.weight") > 0;
}

}  // namespace

void read_scales(const GgufFile& file, const std::string& prefix, ModelConfig& c) {
    const auto read = [&](const char* key, float usual) {
        const auto value = float(file.number(prefix + key, usual));
        if (!(value > 0) || !std::isfinite(value))
            fail(ErrorCode::format, file.path(), ": ", prefix, key, " is ", value, ", not a positive number");
        return value;
    };
    c.embedding_scale = read("embedding_scale", c.embedding_scale);
    c.residual_scale = read("residual_scale", c.residual_scale);
    c.score_scale = read("attention.scale", c.score_scale);
    c.output_scale = 1 / read("logit_scale", 1 / c.output_scale);
    if (c.residual_scale != 1 && c.architecture->encoder != EncoderKind::none)
        fail(ErrorCode::unsupported, file.path(), ": ", prefix,
             "residual_scale is not supported in an encoder-decoder");
}

void read_temperature(const GgufFile& file, const std::string& prefix, double usual, ModelConfig& c) {
    c.temperature_scale = file.number(prefix + "attention.temperature_scale", usual);
    c.temperature_length =
        file.integer(prefix + "attention.temperature_length", 1, 1 << 30, c.ropes[0].n_ctx_orig);
}

ModelConfig read_config(const GgufFile& file) {
    ModelConfig c;
    c.architecture = &find_architecture(file);
    c.name = file.string("general.name", file.path());
    const std::string prefix = concat(c.architecture->name, ".");
    if (!file.boolean(prefix + "attention.causal", true))
        fail(ErrorCode::unsupported, file.path(), ": attention to later tokens, too (", prefix,
             "attention.causal is false), is not supported: the model embeds texts and generates none");
    c.n_vocab = read_vocab(file);
    c.n_layers = int(file.integer(prefix + "block_count", 1, 4096));
    c.n_mtp_layers = read_mtp_layers(file, prefix, c.n_layers);
    c.n_layers -= c.n_mtp_layers;
    c.d_model = int(file.integer(prefix + "embedding_length", 1, 1 << 20));
    c.n_heads = int(file.integer(prefix + "attention.head_count", 1, 1 << 14));
    if (!file.has(prefix + "attention.key_length") && c.d_model % c.n_heads)
        fail(ErrorCode::format, file.path(), ": ", prefix, "embedding_length ", c.d_model,
             " is not a multiple of head_count ", c.n_heads);
    c.n_ctx_train = file.integer(prefix + "context_length", 1, 1 << 30);
    read_encoder(file, prefix, c);
    read_layers(file, prefix, c);
    c.parallel_residual = c.architecture->parallel_residual;
    if (c.architecture->scaled_scores) c.score_scale = 1 / std::sqrt(float(c.head_dim));
    const std::string rms_eps = prefix + "attention.layer_norm_rms_epsilon",
                      layer_eps = prefix + "attention.layer_norm_epsilon";
    const bool of_rms =
        c.architecture->norm == NormKind::rms ||
        (file.has(rms_eps) && !file.has(layer_eps));  // phimoe's files use the RMS key for LayerNorm
    c.norm_eps = float(file.number(of_rms ? rms_eps : layer_eps));
    if (c.norm_eps < 0)
        fail(ErrorCode::format, file.path(), ": ", prefix, "the norm's epsilon is negative: ", c.norm_eps);
    c.activation = read_activation(file, c.architecture->activation);
    read_caps(file, prefix, c);
    read_experts(file, prefix, c);
    const Positions positions = c.architecture->positions;
    if (positions == Positions::rope_interleaved || positions == Positions::rope_neox)
        choose_ropes(file, prefix, read_rope(file, prefix, c), c);
    else
        for (LayerConfig& layer : c.layers) layer.rope = -1;
    if (c.architecture->configure) c.architecture->configure(file, prefix, c);
    require_sane(file, c);
    return c;
}

}  // namespace slimrt
