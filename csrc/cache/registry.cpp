// Every cache mode, one line each.
#include "cache/modes/modes.h"
#include "core/error.h"

namespace slimrt {
namespace {

const std::vector<const CacheMode*>& all_modes() {
    static const std::vector<const CacheMode*> modes = {
        kv_mode(), k_mode(),  kr_mode(),   v_mode(),       x_mode(),      xr_mode(),
        e_mode(),  e1_mode(), kivi_mode(), lowrank_mode(), latent_mode(),
    };
    return modes;
}

const char* kind_of_mode(bool cross) { return cross ? "cross-attention cache mode" : "cache mode"; }

std::string names_of(const std::vector<const CacheMode*>& modes) {
    std::string names;
    for (const CacheMode* mode : modes) names += concat(names.empty() ? "" : ", ", mode->name());
    return names;
}

}  // namespace

std::vector<const CacheMode*> cache_modes(bool cross) {
    std::vector<const CacheMode*> modes;
    for (const CacheMode* mode : all_modes())
        if (mode->serves(cross)) modes.push_back(mode);
    return modes;
}

const CacheMode& find_cache_mode(const std::string& name, bool cross) {
    for (const CacheMode* mode : cache_modes(cross))
        if (name == mode->name()) return *mode;
    fail(ErrorCode::unsupported, "unknown ", kind_of_mode(cross), " '", name,
         "'; the modes are: ", names_of(cache_modes(cross)));
}

Levels read_levels(const CacheMode& mode, const std::string& text) {
    const Levels usual = mode.default_levels();
    const Levels levels = text.empty() ? usual : parse_levels(text, usual);
    if (levels.predicts && !mode.has_latents())
        fail(ErrorCode::argument, "'", text, "': keys predict latents of V, and cache mode '", mode.name(),
             "' has none");
    return levels;
}

std::string refusal_of(const CacheMode& mode, const AttnConfig& c) {
    if (c.latent > 0 && !mode.for_latent_attention())
        return concat("K and V are made of a latent of ", c.latent,
                      " columns (MLA), which mode latent stores");
    if (c.latent == 0 && mode.for_latent_attention()) return "K and V are not made of a latent (MLA)";
    if (c.clamp > 0 && !mode.keeps_v_bias())  // that is, rows that do not hold V
        return concat("K and V are clamped to ", c.clamp,
                      " (attention.clamp_kqv), so they are no products of ",
                      "the layer's input, and must be stored");
    if (c.norms_v && !mode.keeps_v_bias())
        return "V is normed, so it is no product of the layer's input, and must be stored";
    if (c.sinks && !mode.keeps_v_bias())
        return "its softmax weights do not sum to 1 (attn_sinks), so V's bias, which these rows do not know, "
               "cannot be added afterwards";
    return mode.refusal(c);
}

const CacheMode& require_cache_mode(const std::string& name, const AttnConfig& config) {
    const CacheMode& mode = find_cache_mode(name, config.cross);
    const std::string reason = refusal_of(mode, config);
    if (reason.empty()) return mode;
    std::vector<const CacheMode*> legal = cache_modes(config.cross);
    std::erase_if(legal, [&](const CacheMode* other) { return !refusal_of(*other, config).empty(); });
    fail(ErrorCode::cache_unsupported, kind_of_mode(config.cross), " '", name, "' is not possible",
         config.cross ? "" : concat(" in layer ", config.layer), ": ", reason,
         ". Modes that work here: ", names_of(legal));
}

std::vector<Extreme> CacheMode::extremes(const AttnConfig& c, int64_t tokens, int64_t longest,
                                         int64_t n_ctx) const {
    return {{longest, n_ctx - 1}, {longest, 0}, {std::min<int64_t>(c.head_dim, tokens), n_ctx - 1}};
}

Written Written::rows_of(int64_t first, int64_t n) const {
    Written some = *this;
    for (std::vector<Tensor>* rows : {&some.planes, &some.read_back, &some.dense})
        for (Tensor& t : *rows) t = t.rows_of(first, n);
    some.x = x.rows_of(first, n);
    return some;
}

}  // namespace slimrt
