// Architectures and cache modes described for Python, so that nothing about them is written a second time
// there.
#include <nanobind/stl/string.h>

#include "bindings/bindings.h"
#include "bindings/engine_options.h"
#include "cache/unrotated_keys.h"
#include "core/error.h"
#include "core/gguf.h"
#include "model/architecture.h"
#include "model/cache_choice.h"
#include "model/cache_keys.h"
#include "model/weights.h"

namespace slimrt {
namespace {

const char* name_of(Positions positions) {
    constexpr const char* kNames[] = {"learned", "rope_interleaved", "rope_neox", "relative", "alibi"};
    return kNames[int(positions)];
}

const char* name_of(Norms norms) {
    constexpr const char* kNames[] = {"before", "shared", "after", "both", "sums"};
    return kNames[int(norms)];
}

const char* name_of(QkNorm norm) {
    constexpr const char* kNames[] = {"none", "row", "head"};
    return kNames[int(norm)];
}

const char* name_of(WindowRope rope) {
    constexpr const char* kNames[] = {"same", "own", "only"};
    return kNames[int(rope)];
}

const char* name_of(Presence presence) {
    constexpr const char* kNames[] = {"never", "optional", "required"};
    return kNames[int(presence)];
}

const char* name_of(EncoderKind kind) {
    constexpr const char* kNames[] = {"none", "tokens", "mel", "audio", "series"};
    return kNames[int(kind)];
}

std::string name_of(DType type) { return dtype_info(type).name; }

nb::dict architecture_dict(const Architecture& a) {
    nb::dict d;
    d["name"] = a.name;
    d["positions"] = name_of(a.positions);
    d["norms"] = name_of(a.norms);
    d["norm"] = a.norm == NormKind::rms ? "rms" : "layer";
    d["qk_norm"] = name_of(a.qk_norm);
    d["scaled_scores"] = a.scaled_scores;
    d["v_norm"] = a.v_norm;
    d["qkv_bias"] = name_of(a.qkv_bias);
    d["sliding_window"] = a.sliding_window;
    d["usual_window"] = a.usual_window;
    d["usual_score_cap"] = a.usual_score_cap;
    d["own_longrope"] = a.own_longrope;
    d["full_period"] = a.layers.full_period;
    d["window_rope"] = name_of(a.layers.window_rope);
    d["window_base"] = a.layers.window_base;
    d["unturned_period"] = a.layers.unturned_period;
    d["whole_ramp"] = a.whole_ramp;
    d["latent"] = a.latent;
    d["encoder"] = name_of(a.encoder);
    return d;
}

nb::list architecture_list() {
    nb::list list;
    for (const Architecture* a : architectures()) list.append(architecture_dict(*a));
    return list;
}

size_t plane_bytes(DType type, int width, int heads) {
    return head_bytes(type, width / heads).total() * heads;
}

nb::dict mode_dict(const CacheMode& mode, const AttnConfig& c, const std::string& refusal) {
    nb::list planes, folds, unread;
    const std::vector<Format> older = mode.older_formats(c);  // where rows age, most are in the oldest format
    for (const Plane& p : older.empty() ? mode.format(c) : older.back())
        planes.append(nb::make_tuple(p.name, p.width, p.heads, dtype_info(p.type).name,
                                     p.block_bytes() / kBlockTokens));
    for (const Fold& f : mode.folds(c)) folds.append(nb::make_tuple(f.suffix, f.rows, f.cols, f.required));
    for (const Unread& u : mode.unread(c)) unread.append(nb::make_tuple(u.suffix, u.replaced));
    nb::dict d;
    d["name"] = mode.name();
    d["cross"] = c.cross;
    d["refusal"] = refusal;
    d["planes"] = planes;
    d["folds"] = folds;
    d["unread"] = unread;
    d["residual"] = mode.has_residual();
    d["sparse"] = mode.has_values_alone() || mode.has_values_of_all();
    d["of_all"] = mode.has_values_of_all();
    d["ages"] = mode.has_levels();
    d["shared"] = mode.shared();
    d["latent"] = mode.for_latent_attention();
    d["inverts"] = mode.inverts();
    return d;
}

/// unrotated: whether other layers read its keys before RoPE.
std::string refusal_of(const CacheMode& mode, const AttnConfig& c, bool unrotated) {
    const std::string reason = refusal_of(mode, c);
    return reason.empty() && unrotated ? unrotated_refusal(mode, c) : reason;
}

/// The reason begins with the first layer that refuses the mode.
std::string refusal_of(const CacheMode& mode, const ModelConfig& config, bool cross, bool unrotated) {
    for (int layer = 0; layer < config.n_layers; ++layer) {
        const std::string reason = refusal_of(mode, attention_config(config, layer, cross), unrotated);
        if (!reason.empty()) return cross ? reason : concat("layer ", layer, ": ", reason);
    }
    return "";
}

nb::list modes_of_file(const FileOrPath& from) {
    const GgufFile file = open_file(from);
    const ModelConfig config = read_config(file);
    nb::list list;
    if (config.n_layers == 0) return list;  // without a decoder nothing is kept
    const bool unrotated = shares_unrotated_keys(file, config);
    for (const bool cross : {false, true}) {
        if (cross && config.architecture->encoder == EncoderKind::none) continue;
        for (const CacheMode* mode : cache_modes(cross))
            list.append(mode_dict(*mode, attention_config(config, 0, cross),
                                  refusal_of(*mode, config, cross, unrotated && !cross)));
    }
    return list;
}

nb::list modes_of_attention(int d_model, int n_heads, int n_kv_heads, int head_dim, int n_rot,
                            const std::string& qk_norm, int64_t window, bool cross, const std::string& type,
                            int rank, const std::string& residual_type, int v_heads, bool unrotated,
                            float clamp, bool layer_norm, float score_cap, bool sinks, int latent,
                            bool norms_v, bool v_is_k) {
    if (d_model < 1 || n_heads < 1 || n_kv_heads < 1 || head_dim < 1 || n_rot < 0 || n_rot > head_dim ||
        latent < 0 || rank < 0 || v_heads < 0 || v_heads >= n_kv_heads)
        fail(ErrorCode::argument, "no attention has these sizes: d_model ", d_model, ", n_heads ", n_heads,
             ", n_kv_heads ", n_kv_heads, ", head_dim ", head_dim, ", n_rot ", n_rot, ", rank ", rank,
             ", v_heads ", v_heads);
    AttnConfig c{.cross = cross,
                 .d_model = d_model,
                 .n_heads = n_heads,
                 .n_kv_heads = n_kv_heads,
                 .head_dim = head_dim,
                 .rope = n_rot > 0,
                 .n_rot = n_rot,
                 .window = window,
                 .rank = rank,
                 .v_heads = v_heads,
                 .clamp = clamp,
                 .score_cap = score_cap,
                 .sinks = sinks,
                 .latent = latent};
    if (qk_norm != name_of(QkNorm::none)) c.qk_norm_eps = 0.0f;
    c.norms_heads = qk_norm == name_of(QkNorm::head);
    c.norms_v = norms_v;
    c.v_is_k = v_is_k;
    c.qk_norm_kind = layer_norm ? NormKind::layer : NormKind::rms;
    c.latent_heads = default_latent_heads(n_kv_heads);
    c.type_r = require_cache_type(residual_type.c_str());
    const bool levels = says_levels(type);
    if (!levels) c.type_k = c.type_v = require_cache_type(type.c_str());
    nb::list list;
    for (const CacheMode* mode : cache_modes(cross)) {
        if (levels && mode->has_levels()) c.levels = parse_levels(type, mode->default_levels());
        list.append(mode_dict(*mode, c, refusal_of(*mode, c, unrotated)));
    }
    return list;
}

/// The levels of a mode whose rows age; a text may set some of them.
nb::dict levels_of(const std::string& mode_name, const std::string& text) {
    const CacheMode& mode = find_cache_mode(mode_name, false);
    if (!mode.has_levels())
        fail(ErrorCode::argument, "rows of cache mode '", mode_name, "' do not age: it has no levels");
    const Levels levels = read_levels(mode, text);
    nb::list of;
    for (const Level& level : levels.of)
        of.append(nb::make_tuple(name_of(level.type_k), name_of(level.type_v), level.part, level.share,
                                 level.rows));
    nb::dict d;
    d["text"] = to_text(levels, mode.default_levels());
    d["levels"] = of;
    d["sinks"] = levels.sinks;
    d["recent"] = levels.recent;
    d["eager"] = levels.eager;
    d["predicts"] = levels.predicts;
    return d;
}

nb::list resolved_layers(const FileOrPath& from, const nb::kwargs& args) {
    const GgufFile file = open_file(from);
    nb::list list;
    for (const LayerOptions& layer : resolve_layers(file, read_config(file), read_options(args).cache)) {
        nb::dict d;
        d["owner"] = layer.owner;
        d["mode"] = layer.mode->name();
        const bool aging = layer.mode->has_levels();
        d["type_k"] = aging ? to_text(layer.levels, layer.mode->default_levels()) : name_of(layer.type_k);
        d["type_v"] = aging ? "auto" : name_of(layer.type_v);
        d["rank"] = layer.rank;
        d["residual_type"] = layer.residual_type;
        d["v_heads"] = layer.v_heads;
        list.append(d);
    }
    return list;
}

}  // namespace

void bind_describe(nb::module_& m) {
    m.def("architectures", &architecture_list);
    m.def("why_refused", &why_refused, nb::arg("name"));
    m.def("modes", &modes_of_file, nb::arg("file"));
    m.def("levels", &levels_of, nb::arg("mode"), nb::arg("text"));
    m.def("resolve_layers", &resolved_layers, nb::arg("file"), nb::arg("options"));
    m.def("attention_modes", &modes_of_attention, nb::kw_only(), nb::arg("d_model"), nb::arg("n_heads"),
          nb::arg("n_kv_heads"), nb::arg("head_dim"), nb::arg("n_rot"), nb::arg("qk_norm"),
          nb::arg("window") = 0, nb::arg("cross") = false, nb::arg("type") = "f16", nb::arg("rank") = 0,
          nb::arg("residual_type") = "f16", nb::arg("v_heads") = 0, nb::arg("unrotated") = false,
          nb::arg("clamp") = 0.0f, nb::arg("layer_norm") = false, nb::arg("score_cap") = 0.0f,
          nb::arg("sinks") = false, nb::arg("latent") = 0, nb::arg("norms_v") = false,
          nb::arg("v_is_k") = false);
    m.def(
        "plane_bytes",
        [](const std::string& type, int width, int heads) {
            return plane_bytes(require_cache_type(type.c_str()), width, heads);
        },
        nb::arg("type"), nb::arg("width"), nb::arg("heads"));
}

}  // namespace slimrt
