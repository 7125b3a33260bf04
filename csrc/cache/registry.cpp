// Every cache mode, one line each.
#include "cache/cache_mode.h"
#include "cache/modes/modes.h"
#include "core/error.h"

namespace slimrt {

const std::vector<const CacheMode*>& cache_modes() {
    static const std::vector<const CacheMode*> modes = {
        kv_mode(), k_mode(), kr_mode(), v_mode(), x_mode(), xr_mode(),
    };
    return modes;
}

const CacheMode& find_cache_mode(const std::string& name) {
    std::string known;
    for (const CacheMode* mode : cache_modes()) {
        if (name == mode->name()) return *mode;
        known += concat(known.empty() ? "" : ", ", mode->name());
    }
    fail(ErrorCode::unsupported, "unknown cache mode '", name, "'; the modes are: ", known);
}

const CacheMode& require_cache_mode(const std::string& name, const AttnConfig& config) {
    const CacheMode& mode = find_cache_mode(name);
    const std::string reason = mode.refusal(config);
    if (reason.empty()) return mode;
    std::string legal;
    for (const CacheMode* other : cache_modes())
        if (other->refusal(config).empty()) legal += concat(legal.empty() ? "" : ", ", other->name());
    fail(ErrorCode::cache_unsupported, "cache mode '", name, "' is not possible in layer ", config.layer,
         ": ", reason, ". Modes that work here: ", legal);
}

}  // namespace slimrt
