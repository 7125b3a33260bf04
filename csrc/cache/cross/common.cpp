// What the cross-attention modes share, and the list of them.
#include <algorithm>

#include "cache/cross/cross.h"
#include "core/error.h"

namespace slimrt {

std::string narrow_k(const AttnConfig& c, const char* what) {
    if (c.kv_width() >= c.d_model) return "";
    return concat("K is ", c.kv_width(), " wide and the encoder's output ", c.d_model, ", so ", what,
                  " cannot be computed from it");
}

Tensor cross_queries(Backend& backend, const CrossInput& in) {
    return project(backend, in.scratch, in.x, {{in.weights.q, in.weights.q_bias}})[0];
}

void cross_attention(Backend& backend, const AttnConfig& c, std::span<const AttentionSequence> sources,
                     const ScoreTerm& scores, const ValueTerm& values) {
    backend.attention({.sequences = sources,
                       .scores = {&scores, 1},
                       .values = {&values, 1},
                       .n_heads = c.n_heads,
                       .scale = c.scale});
}

void some_queries(const CrossInput& in, const SomeQueries& f) {
    const int64_t most = in.config.head_dim;
    std::vector<AttentionSequence> some;
    for (int64_t first = 0; first < in.x.rows; first += most) {
        const int64_t n = std::min(most, in.x.rows - first);
        some.clear();
        for (AttentionSequence s : in.sources) {
            const int64_t begin = std::max<int64_t>(s.query, first);
            const int64_t end = std::min<int64_t>(s.query + s.n_queries, first + n);
            if (begin >= end) continue;
            s.query = int(begin - first);
            s.n_queries = int(end - begin);
            some.push_back(s);
        }
        const Scratch::Scope scope(in.scratch);
        f(first, n, some);
    }
}

const std::vector<const CrossMode*>& cross_modes() {
    static const std::vector<const CrossMode*> modes = {
        cross_kv_mode(),
        cross_k_mode(),
        cross_e_mode(),
        cross_e1_mode(),
    };
    return modes;
}

const CrossMode& require_cross_mode(const std::string& name, const AttnConfig& config) {
    std::string known, legal;
    const CrossMode* found = nullptr;
    for (const CrossMode* mode : cross_modes()) {
        if (name == mode->name()) found = mode;
        known += concat(known.empty() ? "" : ", ", mode->name());
        if (mode->refusal(config).empty()) legal += concat(legal.empty() ? "" : ", ", mode->name());
    }
    if (!found)
        fail(ErrorCode::unsupported, "unknown cross-attention cache mode '", name,
             "'; the modes are: ", known);
    const std::string reason = found->refusal(config);
    if (!reason.empty())
        fail(ErrorCode::cache_unsupported, "cross-attention cache mode '", name,
             "' is not possible: ", reason, ". Modes that work here: ", legal);
    return *found;
}

}  // namespace slimrt
