#include "model/cache_choice.h"

#include <algorithm>
#include <set>

#include "cache/unrotated_keys.h"
#include "core/error.h"
#include "model/architecture.h"
#include "model/cache_keys.h"

namespace slimrt {
namespace {

const std::string kAuto = "auto";

template <class T>
void require_length(const char* what, const ByLayer<T>& option, int n_layers, const char* of = "entries") {
    if (!option.each.empty() && option.each.size() != size_t(n_layers))
        fail(ErrorCode::argument, what, ": ", option.each.size(), " ", of, " were given for ", n_layers,
             " layers: give one for all, or one a layer");
}

/// What was asked for, else what the file says, else f16.
DType choose_type(const std::string& asked, const std::string& stored) {
    return require_cache_type((asked != kAuto ? asked : stored.empty() ? "f16" : stored).c_str());
}

/// What was asked for, else what the file says, else the mode's default.
void choose_levels(const std::string& asked, const std::string& stored, const std::string& type_v,
                   LayerOptions& layer) {
    layer.levels = read_levels(*layer.mode, asked != kAuto ? asked : stored);
    if (type_v != kAuto && !says_levels(type_v))
        for (Level& level : layer.levels.of) level.type_v = require_cache_type(type_v.c_str());
    layer.type_k = layer.levels.of[0].type_k;
    layer.type_v = layer.levels.of[0].type_v;
}

/// What was asked for, else what the layer was folded with.
int resolve_rank(const GgufFile& file, int asked, int64_t folded, const AttnConfig& c) {
    if (asked >= 0 && folded >= 0 && asked != folded)
        fail(ErrorCode::argument, file.path(), " was folded with a residual of rank ", folded, " in layer ",
             c.layer, ", not ", asked, ": leave rank ", asked,
             " out, or fold the model it was made from again ", "(slimrt convert --cache k+r --rank ...)");
    const int64_t rank = asked >= 0 ? asked : folded;
    if (rank > c.computed_width())
        fail(asked >= 0 ? ErrorCode::argument : ErrorCode::format, "a residual of rank ", rank,
             " is wider than V: layer ", c.layer, " has ", c.computed_width(), " columns of it",
             c.v_heads ? " that are not kept" : "");
    return int(rank);
}

void choose_residual(const LayerOptions& options, AttnConfig& c) {
    const std::string where = concat("cache mode '", options.mode->name(), "' of layer ", c.layer);
    if (options.rank < 0)
        fail(ErrorCode::cache_unsupported, where, " needs a residual whose rank is neither in the file ",
             "nor given: convert the model first (slimrt convert --cache ", options.mode->name(),
             "), or give a rank");
    c.rank = options.rank;
    if (c.rank == 0) return;
    if (options.residual_type.empty())
        fail(ErrorCode::argument, where,
             " needs the type of its residual (residual_type); there are: ", cache_type_names());
    c.type_r = require_cache_type(options.residual_type.c_str());
}

void require_residual(const CacheOptions& o, const std::vector<LayerOptions>& layers) {
    bool asked = false;
    std::set<std::string> modes;
    for (int i = 0; i < int(layers.size()); ++i) {
        if (layers[i].mode->has_residual()) return;
        const std::string& type = o.residual_type.of(i);
        asked |= o.rank.of(i) >= 0 || (type != kAuto && !type.empty());
        modes.insert(layers[i].mode->name());
    }
    if (!asked) return;
    std::string with, without;
    for (const CacheMode* mode : cache_modes(false))
        if (mode->has_residual()) with += concat(with.empty() ? "" : ", ", "'", mode->name(), "'");
    for (const std::string& mode : modes) without += concat(without.empty() ? "" : ", ", mode);
    fail(ErrorCode::argument, "rank and residual type belong to cache mode ", with,
         ", and no layer has it: ", without);
}

void set_sparsity(const CacheMode& mode, float threshold, float delta, AttnConfig& c) {
    const auto check = [&](const char* name, float value, bool has, const char* modes) {
        if (!(value >= 0 && value < 1))
            fail(ErrorCode::argument, name, " must be at least 0 and below 1, got ", value);
        if (value > 0 && !has)
            fail(ErrorCode::cache_unsupported, name, " skips rows of ", modes, ", which cache mode '",
                 mode.name(), "' of layer ", c.layer, " does not have: use one that does, or ", name, " 0");
    };
    if (threshold > 0 && delta > 0)
        fail(ErrorCode::argument, "sparse_threshold and sparse_delta are two budgets: give one of them");
    const bool of_all = mode.has_values_of_all();
    check("sparse_threshold", threshold, of_all || mode.has_values_alone(),
          "V (cache mode kv) or rows that all heads read (k, k+r, x, xr, latent)");
    check("sparse_delta", delta, of_all, "what all heads read (cache modes k, k+r, x, xr, latent)");
    c.sparse_threshold = threshold;
    c.sparse_delta = delta;
}

/// Whether a row of a layer's input, or of an encoder's output, is no wider than K and V together.
bool row_is_narrow(const AttnConfig& c) { return c.d_model <= 2 * c.kv_width(); }

/// What the file says; else mode e, which keeps an encoder's output once for all layers, where reading that
/// in each layer moves no more bytes than K and V would; else kv.
std::vector<LayerChoice> choose_cross(const GgufFile& file, const ModelConfig& model, const CacheOptions& o) {
    if (model.architecture->encoder == EncoderKind::none) {
        if (o.cross != kAuto)
            fail(ErrorCode::argument, "cross-attention cache mode '", o.cross,
                 "' was given for architecture '", model.architecture->name, "', which has no encoder");
        return {};
    }
    if (model.n_layers == 0) return {};
    AttnConfig c = attention_config(model, 0, true);
    const std::string stored = file.string("slimrt.cache.cross", row_is_narrow(c) ? "e" : "kv");
    const bool as_stored = o.cross == kAuto || o.cross == stored;
    c.type_k = c.type_v =
        choose_type(o.cross_type, as_stored ? file.string("slimrt.cache.cross_type", "") : "");
    const CacheMode& mode = require_cache_mode(as_stored ? stored : o.cross, c);
    std::vector<LayerChoice> choices;
    for (; c.layer < model.n_layers; ++c.layer) choices.push_back({&mode, c, mode.shared() ? 0 : c.layer});
    return choices;
}

/// The default where the file says none: latent with latent attention; x in an encoder-decoder where it is
/// exact and no wider than K and V; else kv.
const char* default_mode(const ModelConfig& model, const CacheOptions& o) {
    const AttnConfig c = attention_config(model, 0);
    const bool x = model.architecture->encoder != EncoderKind::none && o.sparse_threshold == 0 &&
                   row_is_narrow(c) && refusal_of(find_cache_mode("x", false), c).empty();
    return c.latent ? "latent" : x ? "x" : "kv";
}

/// A layer that reads another's rows may not have options that differ from its owner's.
template <class T, class Stored>
void require_option_of_owner(const char* what, const ByLayer<T>& asked, const T& none, const Stored& stored,
                             int layer, int owner) {
    const T& own = asked.of(layer);
    if ((own == none || own == asked.of(owner)) && stored[layer] == stored[owner]) return;
    fail(ErrorCode::argument, what, " of layer ", layer, " is not that of layer ", owner,
         ", whose rows it reads: give both the same");
}

const CacheMode& require_unrotated(const CacheMode& mode, const AttnConfig& c) {
    if (const CacheMode* found = with_unrotated_keys(mode, c)) return *found;
    std::string legal;
    for (const CacheMode* other : cache_modes(false))
        if (refusal_of(*other, c).empty() && with_unrotated_keys(*other, c))
            legal += concat(legal.empty() ? "" : ", ", other->name());
    fail(ErrorCode::cache_unsupported, "cache mode '", mode.name(), "' is not possible in layer ", c.layer,
         ": ", unrotated_refusal(mode, c), ". Modes that work here: ", legal);
}

std::vector<LayerChoice> choose_layers(const GgufFile& file, const ModelConfig& model, const CacheOptions& o,
                                       const ExtraTensors& extra) {
    const bool unrotated = shares_unrotated_keys(file, model);
    const float stored = o.sparse_delta < 0 ? stored_delta(file) : 0;
    std::vector<LayerChoice> choices;
    for (const LayerOptions& layer : resolve_layers(file, model, o, extra)) {
        const int i = int(choices.size());
        if (layer.owner != i) {
            LayerChoice& owner = choices[layer.owner];
            if (owner.config.v_heads)
                fail(ErrorCode::cache_unsupported, "layer ", i, " reads the rows of layer ", layer.owner,
                     ", of which some heads keep V (slimrt.cache.v_heads): such rows cannot be shared");
            if (unrotated && !owner.shared) owner.mode = &require_unrotated(*owner.mode, owner.config);
            owner.shared = true;
            LayerChoice reader = owner;
            reader.config.layer = i;
            reader.shared = false;
            reader.rotates_keys = !unrotated;
            choices.push_back(reader);
            continue;
        }
        AttnConfig c = attention_config(model, i);
        c.type_k = layer.type_k;
        c.type_v = layer.type_v;
        c.levels = layer.levels;
        c.latent_heads = layer.latent_heads;
        require_cache_mode(layer.mode->name(), c);
        c.v_heads = layer.v_heads;
        if (layer.mode->has_residual()) choose_residual(layer, c);
        float delta = o.sparse_delta;
        if (delta < 0) delta = o.sparse_threshold == 0 && layer.mode->has_values_of_all() ? stored : 0;
        set_sparsity(*layer.mode, o.sparse_threshold, delta, c);
        choices.push_back({layer.mode, c, i});
    }
    return choices;
}

/// For an encoder that is all: nothing is kept, so that any choice would be dropped.
void require_no_cache(const ModelConfig& c, const CacheOptions& o) {
    const auto given = [](const auto& option, const auto& none) {
        return option.all != none || !option.each.empty();
    };
    if (given(o.mode, kAuto) || given(o.type_k, kAuto) || given(o.type_v, kAuto) ||
        given(o.residual_type, kAuto) || given(o.rank, -1) || o.cross != kAuto || o.cross_type != kAuto ||
        o.sparse_threshold > 0 || o.sparse_delta > 0)
        fail(ErrorCode::argument, "architecture '", c.architecture->name,
             "' has no decoder, and so no cache: leave out the cache's modes and types");
}

int64_t resolve_n_ctx(const ModelConfig& c, int64_t n_ctx) {
    constexpr int64_t kUsual = 4096;
    if (n_ctx == 0) return std::min(c.n_ctx_train, kUsual);
    const bool learned = c.architecture->positions == Positions::learned;
    if (n_ctx < 0 || n_ctx > (1 << 30) || (learned && n_ctx > c.n_ctx_train))
        fail(ErrorCode::argument, "n_ctx ", n_ctx, " is not possible: the model has positions for ",
             c.n_ctx_train);
    return n_ctx;
}

int64_t resolve_n_source(const ModelConfig& c, int64_t n_source) {
    if (c.architecture->encoder == EncoderKind::none) return 0;
    if (n_source == 0) return c.n_source_train;
    if (n_source < 0 || n_source > (1 << 24) ||
        (c.architecture->encoder_positions && n_source > c.n_source_train))
        fail(ErrorCode::argument, "n_source ", n_source, " is not possible: the encoder has positions for ",
             c.n_source_train);
    return n_source;
}

}  // namespace

std::vector<LayerOptions> resolve_layers(const GgufFile& file, const ModelConfig& model,
                                         const CacheOptions& o, const ExtraTensors& extra) {
    const int n = model.n_layers;
    require_length("cache", o.mode, n, "cache modes");
    require_length("cache_type_k", o.type_k, n);
    require_length("cache_type_v", o.type_v, n);
    require_length("residual_type", o.residual_type, n);
    require_length("rank", o.rank, n);
    const Names modes = stored_names(file, "slimrt.cache.modes", n, default_mode(model, o));
    const Names types = stored_names(file, "slimrt.cache.types", n, "");
    const Names residual_types = stored_names(file, "slimrt.cache.residual_types", n, "");
    const std::vector<int> owners = read_owners(file, model), v_heads = read_v_heads(file, model);

    std::vector<LayerOptions> layers;
    for (int i = 0; i < n; ++i) {
        if (const int owner = owners[i]; owner != i) {
            require_option_of_owner("cache", o.mode, kAuto, modes, i, owner);
            require_option_of_owner("cache_type_k", o.type_k, kAuto, types, i, owner);
            require_option_of_owner("cache_type_v", o.type_v, kAuto, types, i, owner);
            require_option_of_owner("residual_type", o.residual_type, kAuto, residual_types, i, owner);
            require_option_of_owner("rank", o.rank, -1, residual_types, i, owner);
            layers.push_back(layers[owner]);
            continue;
        }
        const std::string& asked = o.mode.of(i);
        const bool as_stored = asked == kAuto || asked == modes[i];
        LayerOptions layer{.owner = i, .mode = &find_cache_mode(as_stored ? modes[i] : asked, false)};
        const std::string stored_type = as_stored ? types[i] : "";
        if (layer.mode->has_levels()) {
            choose_levels(o.type_k.of(i), stored_type, o.type_v.of(i), layer);
            layer.latent_heads = latent_heads_of(file, model, extra, i);
        } else {
            layer.type_k = choose_type(o.type_k.of(i), stored_type);
            layer.type_v = choose_type(o.type_v.of(i), stored_type);
        }
        if (as_stored && layer.mode->has_v_heads()) layer.v_heads = v_heads[i];
        if (layer.mode->has_residual()) {
            AttnConfig c = attention_config(model, i);
            c.v_heads = layer.v_heads;
            layer.rank = resolve_rank(file, o.rank.of(i), folded_rank(file, model, extra, i), c);
            const std::string& type = o.residual_type.of(i);
            layer.residual_type = type != kAuto && !type.empty() ? type : as_stored ? residual_types[i] : "";
        }
        layers.push_back(layer);
    }
    require_residual(o, layers);
    return layers;
}

CacheChoices choose_caches(const GgufFile& file, const ModelConfig& model, const CacheOptions& o,
                           const ExtraTensors& extra) {
    if (o.n_seqs < 1 || o.n_batch < 1) fail(ErrorCode::argument, "n_seqs and n_batch must be at least 1");
    if (model.n_layers == 0) require_no_cache(model, o);
    const int64_t n_ctx = resolve_n_ctx(model, o.n_ctx);
    if (o.cache_tokens != 0 && o.cache_tokens < n_ctx)
        fail(ErrorCode::argument, "cache_tokens ", o.cache_tokens,
             " is less than one sequence may hold, n_ctx ", n_ctx,
             ": raise it (--cache-tokens), or lower n_ctx (--ctx)");
    return {.layers = choose_layers(file, model, o, extra),
            .cross = choose_cross(file, model, o),
            .n_ctx = n_ctx,
            .n_source = resolve_n_source(model, o.n_source)};
}

}  // namespace slimrt
