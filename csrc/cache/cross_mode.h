// The same contract for cross-attention: what one row of an encoder's output leaves behind, once, and how a
// decoder layer reads it back. Modes are stateless and const.
#pragma once

#include "cache/cache_mode.h"

namespace slimrt {

/// A step's queries and the rows that each of their sequences sees.
struct CrossInput {
    const AttnConfig& config;
    const AttnWeights& weights;
    std::span<const AttentionSequence> sources;
    const std::vector<Rows>& rows;
    Scratch& scratch;
    Tensor x;  // [n, d_model], normed
};

class CrossMode {
  public:
    virtual ~CrossMode() = default;
    virtual const char* name() const = 0;
    /// Why this mode is not exact for this attention; empty when it is legal.
    virtual std::string refusal(const AttnConfig& config) const = 0;
    /// Whether layer 0 keeps the rows of all layers.
    virtual bool shared() const { return false; }
    virtual Format format(const AttnConfig& config) const = 0;
    /// Derived weights, once at load.
    virtual void prepare(Backend&, const AttnConfig&, DerivedWeights&, AttnWeights&) const {}
    /// What encoder states [n, d_model] leave behind in a layer: a tensor for each plane.
    virtual FreshRows rows(Backend& backend, const AttnWeights& weights, Scratch& scratch,
                           Tensor states) const = 0;
    /// K [n, kv_width] of stored rows [n, width] of the first plane.
    virtual Tensor keys(Backend& backend, const AttnWeights& weights, Scratch& scratch,
                        Tensor rows) const = 0;
    /// out [n, q_width] = attention of the step's tokens over their sources, before W_O.
    virtual void attend(Backend& backend, const CrossInput& in, Tensor out) const = 0;
};

/// All of them; cross_registry.cpp.
const std::vector<const CrossMode*>& cross_modes();
/// Throws Error{unsupported} naming the known modes, Error{cache_unsupported} for one that is not possible
/// here.
const CrossMode& require_cross_mode(const std::string& name, const AttnConfig& config);

}  // namespace slimrt
