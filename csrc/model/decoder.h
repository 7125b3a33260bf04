// A transformer's decoder: tokens of a step in, logits out. START HERE, then decoder.cpp.
#pragma once

#include <functional>
#include <map>

#include "cache/kv_cache.h"
#include "model/encoder.h"
#include "model/parts.h"

namespace slimrt {

/// Who watches a step from inside; what is not set is not called.
struct StepObserver {
    /// Before each layer (of each chunk), with the share of the step that is done; may throw to abandon the
    /// step, whose rows then count for nothing.
    std::function<void(double done)> progress;
    /// Each layer's input [n, d_model] of one of its attentions, normed.
    std::function<void(int layer, Tensor x)> attention_input, cross_input;

    bool looks() const { return attention_input || cross_input; }
};

class Decoder {
  public:
    /// Loads weights and allocates the cache, on dry backends too (then only counted), all of which file and
    /// backends must outlive. shares: of all layers, the first ones' first. Throws Error{unsupported} where
    /// layers that need each other would be on several.
    Decoder(const GgufFile& file, const CacheOptions& options, std::span<const BackendLayers> shares,
            const ExtraTensors& extra = {});

    /// Who computes what, in the order of layers. The first has what goes before them, the last one the head.
    const std::vector<Part>& parts() const { return parts_; }
    const Part& part_of(int layer) const;

    /// One step in the layers of a part: x [tokens, d_model], the residual stream before them (of the first
    /// part nothing yet), becomes that after them, and the tokens' rows are in the cache. More than n_batch
    /// tokens, which must be of one sequence, are computed layer by layer, in each layer n_batch at a time.
    void forward(const Part& part, const Batch& batch, Scratch& scratch, Tensor x,
                 const StepObserver& observer) const;
    /// The states [n, d_model] that the head reads: x normed in place; then its logits [n, n_vocab].
    void finish(Tensor x) const;
    void logits(Tensor states, Tensor out) const;

    /// With an encoder: the rows that its output, states [n, d_model], leaves behind in each layer.
    void store_encoder_states(Tensor states, Tensor slots, Scratch& scratch) const;

    /// The most tokens of one sequence that a step takes. Where a mode makes K and V anew for many queries
    /// that is far more than n_batch, so that each layer makes them once for all: 1024 or, if that is more, a
    /// quarter of the context, since x is kept whole. Where rows age it is the context: a prompt is computed
    /// over rows as they were written.
    /// Such rows have no slots, unless a step adds no more than a block of them.
    StepLimits step_limits() const;

    /// What a head of a layer gives rows of encoder states, [n, rows], before the softmax, for such an input.
    void cross_scores(int layer, int head, Tensor x, const AttentionSequence& states, Scratch& scratch,
                      Tensor out) const;

    const ModelConfig& config() const { return config_; }
    const CacheOptions& options() const { return options_; }
    const std::vector<LayerChoice>& layers() const { return choices_.layers; }
    /// A number for the folded tensors that rows of a layer are written with; 0 if there are none. Rows mean
    /// nothing beside others.
    uint64_t fold_of_rows(int layer) const;
    /// Of cross-attention; none without an encoder.
    const std::vector<LayerChoice>& cross() const { return choices_.cross; }
    KvCache& cache() { return *cache_; }
    /// Rows of encoder states; null without an encoder.
    KvCache* encoder_states() { return encoder_states_.get(); }
    Encoder* encoder() const { return encoder_.get(); }
    /// Bytes of weights that a part reads in place from the file.
    uint64_t mapped_bytes(const Part& part) const {
        const auto of_part = weights_.mapped.find(part.backend);
        return of_part == weights_.mapped.end() ? 0 : of_part->second;
    }

  private:
    void embed(const Batch& batch, Scratch& scratch, Tensor x) const;
    /// What an owner has for its readers: of a step, and of a chunk of it. By layer.
    struct OwnerRows {
        DenseRows dense;
        Written written;
    };
    struct StepState {
        const StepObserver& observer;
        std::map<int, OwnerRows> owners;
    };

    void take_dense_rows(const LayerSpan& span, Scratch& scratch, StepState& state) const;
    void add_layer(int layer, const Batch& batch, StepState& state, Scratch& scratch, Tensor x) const;
    void add_scaled(Backend& backend, Tensor x, Tensor out) const;
    void attention(int layer, const Batch& batch, StepState& state, Scratch& scratch, Tensor x,
                   Tensor out) const;
    std::vector<Tensor> queries_and(Backend& backend, std::span<const Projection> others, Scratch& lasting,
                                    const AttnWeights& w, const Rope& rope, const AttnInput& in,
                                    Tensor x) const;
    void store(const Written& written, const KvCache& cache, int layer, Tensor slots) const;
    void cross_attention(int layer, const Batch& batch, StepState& state, Scratch& scratch, Tensor x,
                         Tensor out) const;

    ModelConfig config_;
    CacheOptions options_;
    CacheChoices choices_;
    Weights weights_;
    std::vector<Part> parts_;
    std::unique_ptr<KvCache> cache_, encoder_states_;
    std::unique_ptr<Encoder> encoder_;
};

}  // namespace slimrt
