// A transformer's decoder: tokens of a step in, logits out. START HERE, then decoder.cpp.
#pragma once

#include <functional>
#include <map>

#include "cache/kv_cache.h"
#include "model/encoder.h"
#include "model/parts.h"

namespace slimrt {

/// Callbacks into a running step; those that are not set are not called.
struct StepObserver {
    /// Before each layer (of each chunk), with the fraction of the step that is done, 0 to 1. May throw to
    /// abandon the step; its rows are then discarded.
    std::function<void(double done)> progress;
    /// The normed input [n, d_model] of a layer's self-attention, and of its cross-attention.
    std::function<void(int layer, Tensor x)> attention_input, cross_input;

    bool wants_inputs() const { return attention_input || cross_input; }
};

class Decoder {
  public:
    /// Loads weights and allocates the cache; on dry backends memory is only counted. file and backends must
    /// outlive the decoder. shares: how many layers each backend computes, in layer order. Throws
    /// Error{unsupported} where layers that must be on one backend would be on several.
    Decoder(const GgufFile& file, const CacheOptions& options, std::span<const BackendLayers> shares,
            const ExtraTensors& extra = {});

    /// Which backend computes which layers, in layer order. The first part also embeds, the last has the
    /// head.
    const std::vector<Part>& parts() const { return parts_; }
    const Part& part_of(int layer) const;

    /// One step through the layers of a part: updates x [tokens, d_model], the residual stream, in place (the
    /// first part writes the embeddings there) and stores the tokens' rows in the cache. More than n_batch
    /// tokens must be of one sequence; each layer then takes them in chunks of n_batch.
    void forward(const Part& part, const Batch& batch, Scratch& scratch, Tensor x,
                 const StepObserver& observer) const;
    /// The final norm, in place: x [n, d_model]. Then the head: normed states to out [n, n_vocab]; may scale
    /// states in place.
    void final_norm(Tensor x) const;
    void logits(Tensor states, Tensor out) const;

    /// With an encoder: stores what cross-attention of each layer reads of its output, states [n, d_model].
    void store_encoder_states(Tensor states, Tensor slots, Scratch& scratch) const;

    /// The most tokens of one sequence in a step. Modes that compute K and V again from stored rows for many
    /// queries take far more than n_batch, so that each layer does it once: a quarter of the context, within
    /// 1024 and 16384, since x is kept whole. Modes whose rows age take the whole context, so that a prompt
    /// reads rows as they were written; its rows get no slots unless a step adds at most a block of them.
    StepLimits step_limits() const;

    /// Scaled scores of one cross-attention head before the softmax, out [n, rows of states], for the layer's
    /// normed input x [n, d_model].
    void cross_scores(int layer, int head, Tensor x, const AttentionSequence& states, Scratch& scratch,
                      Tensor out) const;

    const ModelConfig& config() const { return config_; }
    const CacheOptions& options() const { return options_; }
    const std::vector<LayerChoice>& layers() const { return choices_.layers; }
    /// Fingerprint of the folded tensors that a layer's rows are written with, 0 without any: rows can only
    /// be read with the same tensors.
    uint64_t fold_of_rows(int layer) const;
    /// Of cross-attention, by layer; empty without an encoder, or where it is all.
    const std::vector<LayerChoice>& cross() const { return choices_.cross; }
    KvCache& cache() { return *cache_; }
    /// Rows of encoder states; null without an encoder, or where it is all.
    KvCache* encoder_states() { return encoder_states_.get(); }
    Encoder* encoder() const { return encoder_.get(); }
    /// Of the file, by name, as they lie in memory.
    const std::map<std::string, Tensor>& matrices() const { return weights_.matrices; }
    /// Bytes of weights that a part reads in place from the file.
    uint64_t mapped_bytes(const Part& part) const {
        const auto of_part = weights_.mapped.find(part.backend);
        return of_part == weights_.mapped.end() ? 0 : of_part->second;
    }

  private:
    void embed(const Batch& batch, Scratch& scratch, Tensor x) const;
    /// What readers of an owner's rows need: dense rows of the whole step, written rows of the current chunk.
    struct OwnerRows {
        DenseRows dense;
        Written written;
    };
    struct StepState {
        const StepObserver& observer;
        std::map<int, OwnerRows> owners;  // by layer
    };

    void allocate_dense_rows(const LayerSpan& span, Scratch& scratch, StepState& state) const;
    void add_layer(int layer, const Batch& batch, StepState& state, Scratch& scratch, Tensor x) const;
    void add_scaled(Backend& backend, Tensor x, Tensor out) const;
    void attention(int layer, const Batch& batch, StepState& state, Scratch& scratch, Tensor x,
                   Tensor out) const;
    std::vector<Tensor> project_queries(Backend& backend, std::span<const Projection> others,
                                        Scratch& lasting, const AttnWeights& w, const Rope& rope,
                                        const AttnInput& in, Tensor x) const;
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
