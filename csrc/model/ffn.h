// The feed-forward part of a layer: how its tensors are loaded and what it computes. An architecture whose
// network is neither dense_ffn nor expert_ffn defines its own in arch/.
#pragma once

#include "model/architecture.h"
#include "model/weights.h"

namespace slimrt {

/// A file's tensors by name, checked; implemented by Loader.
class TensorSource {
  public:
    virtual ~TensorSource() = default;
    /// A weight [rows, cols] as the backend holds it; none where it is Presence::never, or optional and
    /// missing. part: how many rows are always used together, a divisor of rows; 0: all. Throws
    /// Error{format}.
    virtual Tensor matrix(const std::string& name, int64_t rows, int64_t cols,
                          Presence presence = Presence::required, int64_t part = 0) = 0;
    /// A norm's weight or a bias, f32 [rows, n]: one row, or one for each expert.
    virtual Tensor vectors(const std::string& name, int64_t rows, int64_t n, Presence presence) = 0;
    Tensor vector(const std::string& name, int64_t n, Presence presence) {
        return vectors(name, 1, n, presence);
    }
};

struct Ffn {
    /// Loads the tensors of the layer whose names begin with `prefix`.
    void (*load)(TensorSource& file, const ModelConfig& config, const std::string& prefix, LayerWeights& w);
    /// out [n, d_model] = the network of x, the normed `state`; out may be x itself.
    void (*run)(Backend& backend, const ModelConfig& config, const LayerWeights& w, Scratch& scratch,
                Tensor state, Tensor x, Tensor out);
};

/// Loads a layer's router and experts; nothing where it has no router.
void load_experts(TensorSource& file, const ModelConfig& config, const std::string& prefix, ExpertWeights& w);
/// out = the weighted results of x's experts, which the router chooses by `routed`; out may be either.
void run_experts(Backend& backend, const ModelConfig& config, const ExpertWeights& w, Scratch& scratch,
                 Tensor routed, Tensor x, Tensor out);

}  // namespace slimrt
