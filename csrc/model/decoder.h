// A decoder-only transformer: tokens of a step in, logits out. START HERE, then decoder.cpp.
#pragma once

#include "cache/kv_cache.h"
#include "model/weights.h"

namespace slimrt {

/// How the context memory is to be used.
struct CacheOptions {
    std::string mode = "auto";             // of all layers; "auto": what the file says, else "kv"
    std::vector<std::string> layer_modes;  // or one a layer; filled in by the decoder
    DType type_k = DType::F16, type_v = DType::F16;
    int64_t n_ctx = 0;  // 0: the smaller of the model's training context and 4096
    int n_seqs = 1;     // sequences that may be full at once, and the most in one step
    int n_batch = 512;  // most tokens in one step
};

class Decoder {
  public:
    /// Loads weights and allocates the cache, on a dry backend too (then only counted). file must outlive it.
    Decoder(const GgufFile& file, const CacheOptions& options, Backend& backend,
            const ExtraTensors& extra = {});

    /// One step. hidden [outputs, d_model] receives the final normed state of batch.outputs. The rows of the
    /// step's tokens are in the cache afterwards.
    void forward(const Batch& batch, Scratch& scratch, Tensor hidden) const;
    /// logits [n, n_vocab] of final states.
    void logits(Tensor hidden, Tensor out) const;

    /// Called, where set, with each layer's normed attention input [n, d_model].
    std::function<void(int layer, Tensor x)> observe_attention;
    /// Called, where set, before each layer; may throw to abandon the step, whose rows then count for
    /// nothing.
    std::function<void()> poll;

    const ModelConfig& config() const { return config_; }
    const CacheOptions& options() const { return options_; }
    const std::vector<const CacheMode*>& modes() const { return modes_; }
    KvCache& cache() { return *cache_; }
    uint64_t mapped_bytes() const { return weights_.mapped; }

  private:
    void attention(int layer, const Batch& batch, Scratch& scratch, Tensor x) const;
    void feed_forward(int layer, Scratch& scratch, Tensor x) const;
    void norm(const Norm& w, Tensor x, Tensor out) const;

    Backend& backend_;
    ModelConfig config_;
    CacheOptions options_;
    std::vector<const CacheMode*> modes_;
    std::vector<AttnConfig> attn_;
    Weights weights_;
    Buffer rope_buffer_;
    Rope rope_;
    std::unique_ptr<KvCache> cache_;
};

/// The modes a file may use: for each registered mode, why not (empty: legal).
std::vector<std::pair<std::string, std::string>> cache_refusals(const ModelConfig& config);

}  // namespace slimrt
