// How layers of one model differ: window, RoPE, number and width of KV heads.
#include <algorithm>

#include "core/error.h"
#include "model/architecture.h"
#include "model/config.h"
#include "model/latent.h"
#include "model/weights.h"

namespace slimrt {
namespace {

/// A key's array of a number or boolean for each layer; nullopt where the key has no array.
std::optional<std::vector<int64_t>> numbers_by_layer(const GgufFile& file, const std::string& key,
                                                     size_t n_layers, int64_t most) {
    const auto it = file.metadata().find(key);
    if (it == file.metadata().end() || !std::holds_alternative<GgufArray>(it->second)) return std::nullopt;
    std::vector<int64_t> numbers;
    for (const GgufValue& value : elements(std::get<GgufArray>(it->second))) {
        if (const auto* truth = std::get_if<bool>(&value)) numbers.push_back(*truth);
        if (const auto* number = std::get_if<uint64_t>(&value)) numbers.push_back(int64_t(*number));
        if (const auto* number = std::get_if<int64_t>(&value)) numbers.push_back(*number);
    }
    if (numbers.size() != n_layers)
        fail(ErrorCode::format, file.path(), ": key '", key, "' is not an array of ", n_layers, " numbers");
    for (const int64_t number : numbers)
        if (number < 0 || number > most)
            fail(ErrorCode::format, file.path(), ": key '", key, "' holds ", number,
                 ", which is not between 0 and ", most);
    return numbers;
}

/// The window of each layer, by the file's pattern, else by the architecture's.
void read_windows(const GgufFile& file, const std::string& prefix, ModelConfig& c) {
    const int64_t usual = c.architecture->usual_window;
    const int64_t window = file.integer(prefix + "attention.sliding_window", 0, 1 << 30, usual);
    if (!c.architecture->sliding_window && window > 0 && window < c.n_ctx_train)
        fail(ErrorCode::unsupported, file.path(), ": a sliding window (", window,
             ") is not supported in architecture '", c.architecture->name, "'");
    if (!c.architecture->sliding_window || window == 0) return;
    const std::string key = prefix + "attention.sliding_window_pattern";
    const auto each = numbers_by_layer(file, key, c.layers.size(), 1);
    const int64_t period =
        each ? 0 : file.integer(key, 0, c.n_layers + 1, c.architecture->layers.full_period);
    for (size_t i = 0; i < c.layers.size(); ++i)
        if (each ? (*each)[i] : period == 0 || (i + 1) % period) c.layers[i].window = window;
}

/// KV heads and head_dim of each layer; layers with a window may have another head_dim.
void read_heads(const GgufFile& file, const std::string& prefix, ModelConfig& c) {
    const std::string key = prefix + "attention.head_count_kv";
    const auto each = numbers_by_layer(file, key, c.layers.size(), c.n_heads);
    const int64_t all = each ? 0 : file.integer(key, 1, c.n_heads, c.n_heads);
    const int64_t width = std::max(1, c.d_model / c.n_heads);
    const int64_t full = file.integer(prefix + "attention.key_length", 1, 1 << 16, width);
    const int64_t windowed = file.integer(prefix + "attention.key_length_swa", 1, 1 << 16, full);
    for (const auto& [which, length] : {std::pair("", full), std::pair("_swa", windowed)}) {
        const std::string values = concat(prefix, "attention.value_length", which);
        const int64_t other = file.integer(values, 1, 1 << 16, length);
        if (other != length)
            fail(ErrorCode::unsupported, file.path(), ": ", values, " differs from key_length (", other,
                 ", not ", length, "), which is supported with latent attention (MLA) alone");
    }
    for (size_t i = 0; i < c.layers.size(); ++i) {
        LayerConfig& layer = c.layers[i];
        layer.n_kv_heads = int(each ? (*each)[i] : all);
        layer.head_dim = int(layer.window ? windowed : full);
        const std::string attn = concat("blk.", i, ".attn_");
        layer.v_is_k = c.architecture->k_for_v && file.tensors().count(attn + "k.weight") &&
                       !file.tensors().count(attn + "v.weight");
        if (layer.n_kv_heads == 0)
            fail(ErrorCode::unsupported, file.path(), ": layer ", i, " has no KV heads (", key,
                 "): layers without attention are not supported");
        if (c.n_heads % layer.n_kv_heads)
            fail(ErrorCode::format, file.path(), ": ", prefix, "attention.head_count ", c.n_heads,
                 " is not a multiple of head_count_kv ", layer.n_kv_heads);
    }
}

void read_networks(const GgufFile& file, const std::string& prefix, ModelConfig& c) {
    const std::string key = prefix + "feed_forward_length",
                      of_experts = prefix + "expert_feed_forward_length";
    const auto each = numbers_by_layer(file, key, c.layers.size(), 1 << 22);
    const bool said = file.has(key) || !file.has(of_experts);  // may be missing where all layers have experts
    const int64_t all = each ? 0 : file.integer(said ? key : of_experts, 1, 1 << 22);
    for (size_t i = 0; i < c.layers.size(); ++i) {
        c.layers[i].d_ff = int(each ? (*each)[i] : all);
        if (c.layers[i].d_ff == 0)
            fail(ErrorCode::unsupported, file.path(), ": layer ", i, " has no feed-forward network (", key,
                 ")");
    }
}

RopeConfig rope_of_windows(const GgufFile& file, const std::string& prefix, const LayerConfig& layer,
                           const ModelConfig& c) {
    const double usual = c.architecture->layers.window_base;
    const int n_rot = std::min(c.ropes[0].n_rot, layer.head_dim);
    RopeConfig rope{.n_rot = int(file.integer(prefix + "rope.dimension_count_swa", 2, layer.head_dim, n_rot)),
                    .base = file.number(prefix + "rope.freq_base_swa", usual ? usual : c.ropes[0].base),
                    .pair_factors = false};
    if (!(rope.base > 0) || rope.n_rot % 2)
        fail(ErrorCode::format, file.path(), ": ", prefix,
             "rope.freq_base_swa must be positive and rope.dimension_count_swa even");
    return rope;
}

/// For a model with one RoPE: refuses a file that gives layers with a window another.
void refuse_rope_of_windows(const GgufFile& file, const std::string& prefix, const RopeConfig& rope) {
    const std::string base = prefix + "rope.freq_base_swa", n_rot = prefix + "rope.dimension_count_swa";
    if (file.number(base, rope.base) != rope.base || file.number(n_rot, rope.n_rot) != rope.n_rot)
        fail(ErrorCode::unsupported, file.path(), ": a RoPE of layers with a window that differs (", base,
             ", ", n_rot, ") is not supported in this architecture");
}

}  // namespace

void read_layers(const GgufFile& file, const std::string& prefix, ModelConfig& c) {
    c.layers.assign(std::max(c.n_layers, 1), {});
    for (size_t i = 0; i < c.layers.size(); ++i) c.layers[i].owner = int(i);
    read_windows(file, prefix, c);
    read_networks(file, prefix, c);
    c.d_ff = c.layers[0].d_ff;
    c.architecture->latent ? read_latent(file, prefix, c) : read_heads(file, prefix, c);
    c.n_kv_heads = c.layers[0].n_kv_heads;
    c.head_dim = c.layers[0].head_dim;
}

void choose_ropes(const GgufFile& file, const std::string& prefix, const RopeConfig& rope, ModelConfig& c) {
    const LayerPattern& pattern = c.architecture->layers;
    const auto windowed = [](const LayerConfig& layer) { return layer.window > 0; };
    const auto first = std::find_if(c.layers.begin(), c.layers.end(), windowed);
    const bool any = first != c.layers.end();
    c.ropes.push_back(rope);
    if (any && pattern.window_rope == WindowRope::own)
        c.ropes.push_back(rope_of_windows(file, prefix, *first, c));
    else if (any)
        refuse_rope_of_windows(file, prefix, rope);
    for (size_t i = 0; i < c.layers.size(); ++i) {
        LayerConfig& layer = c.layers[i];
        const bool unturned = pattern.unturned_period && (i + 1) % pattern.unturned_period == 0;
        if (unturned || (any && pattern.window_rope == WindowRope::only && !windowed(layer)))
            layer.rope = -1;
        else
            layer.rope = windowed(layer) ? int(c.ropes.size()) - 1 : 0;
    }
}

AttnConfig attention_config(const ModelConfig& c, int layer, bool cross) {
    LayerConfig own = c.layers[layer];
    if (cross) own.rope = -1, own.window = 0;
    const int n_rot = own.rope < 0 ? 0 : c.ropes[own.rope].n_rot;
    const QkNorm norm = c.architecture->qk_norm;
    return {.layer = layer,
            .cross = cross,
            .d_model = c.d_model,
            .n_heads = c.n_heads,
            .n_kv_heads = own.n_kv_heads,
            .head_dim = own.head_dim,
            .rope = n_rot > 0,
            .n_rot = n_rot,
            .qk_norm_eps = norm == QkNorm::none ? std::nullopt : std::optional(c.norm_eps),
            .qk_norm_kind = c.architecture->norm,
            .norms_heads = norm == QkNorm::head,
            .norms_v = c.architecture->v_norm,
            .v_is_k = own.v_is_k,
            .window = own.window,
            .latent_heads = default_latent_heads(own.n_kv_heads),
            .clamp = cross ? 0 : c.clamp_kqv,
            .scale = c.score_scale,
            .score_cap = c.score_cap,
            .sinks = c.sinks && !cross,
            .latent = c.latent,
            .value_dim = c.value_dim,
            .latent_eps = c.latent_eps};
}

}  // namespace slimrt
