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
    float sparse_threshold =
        0;              // softmax weight that decoding may leave unread, of each head (AttentionArgs)
    int64_t n_ctx = 0;  // 0: the smaller of the model's training context and 4096
    int n_seqs = 1;     // sequences that may be full at once, and the most in one step
    int n_batch = 512;  // most tokens in one step
};

class Decoder {
  public:
    /// Loads weights and allocates the cache, on a dry backend too (then only counted). file must outlive it.
    Decoder(const GgufFile& file, const CacheOptions& options, Backend& backend,
            const ExtraTensors& extra = {});

    /// One step: x [tokens, d_model] becomes the residual stream after the last layer, and the tokens' rows
    /// are in the cache. More than n_batch tokens, which must be of one sequence, are computed layer by
    /// layer, in each layer n_batch at a time.
    void forward(const Batch& batch, Scratch& scratch, Tensor x) const;
    /// logits [n, n_vocab] of rows of x, which is normed in place.
    void logits(Tensor x, Tensor out) const;

    /// The most tokens of one sequence that a step takes. Where a mode makes K and V anew for many queries
    /// that is far more than n_batch, so that each layer makes them once for all: 1024 or, if that is more, a
    /// quarter of the context, since x is kept whole.
    int64_t longest_step() const;

    /// Called, where set, with each layer's attention input [n, d_model], after its norm.
    std::function<void(int layer, Tensor x)> observe_attention;
    /// Called, where set, before each layer (of each chunk) with the share of the step that is done; may
    /// throw to abandon the step, whose rows then count for nothing.
    std::function<void(double done)> poll;

    const ModelConfig& config() const { return config_; }
    const CacheOptions& options() const { return options_; }
    const std::vector<const CacheMode*>& modes() const { return modes_; }
    KvCache& cache() { return *cache_; }
    uint64_t mapped_bytes() const { return weights_.mapped; }

  private:
    void embed(const Batch& batch, Scratch& scratch, Tensor x) const;
    void add_layer(int layer, const Batch& batch, DenseRows& dense, Scratch& scratch, Tensor x) const;
    void attention(int layer, const Batch& batch, DenseRows& dense, Scratch& scratch, Tensor x,
                   Tensor out) const;
    void feed_forward(int layer, Scratch& scratch, Tensor x, Tensor out) const;
    /// Returns out, the normed x; or x where there is no such norm.
    Tensor norm(const Norm& w, Tensor x, Tensor out) const;

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
