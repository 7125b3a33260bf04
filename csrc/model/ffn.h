// The feed-forward part of a layer: how its tensors are loaded and what it computes. An architecture with
// another one brings its own in arch/.
#pragma once

#include "model/architecture.h"
#include "model/weights.h"

namespace slimrt {

/// Checked tensors of a file, by name, as Loader reads them.
class TensorSource {
  public:
    virtual ~TensorSource() = default;
    /// [rows, cols] as it multiplies; none where it is never there or optional and missing. part: rows that
    /// are always used together, of which there are one or more; 0: all. Throws Error{format}.
    virtual Tensor matrix(const std::string& name, int64_t rows, int64_t cols,
                          Presence presence = Presence::required, int64_t part = 0) = 0;
    /// A norm's weight or a bias, or one of each of some experts: f32 [rows, n].
    virtual Tensor vectors(const std::string& name, int64_t rows, int64_t n, Presence presence) = 0;
    Tensor vector(const std::string& name, int64_t n, Presence presence) {
        return vectors(name, 1, n, presence);
    }
};

struct Ffn {
    /// The tensors of the layer whose names begin with `prefix`.
    void (*load)(TensorSource& file, const ModelConfig& config, const std::string& prefix, LayerWeights& w);
    /// out [n, d_model] of the normed x, which may be out itself; state: x before its norm.
    void (*run)(Backend& backend, const ModelConfig& config, const LayerWeights& w, Scratch& scratch,
                Tensor state, Tensor x, Tensor out);
};

/// The router and experts of a layer, or nothing where it has no router.
void load_experts(TensorSource& file, const ModelConfig& config, const std::string& prefix, ExpertWeights& w);
/// out = what the experts make of x that the router takes for `routed`; out may be either.
void run_experts(Backend& backend, const ModelConfig& config, const ExpertWeights& w, Scratch& scratch,
                 Tensor routed, Tensor x, Tensor out);

}  // namespace slimrt
