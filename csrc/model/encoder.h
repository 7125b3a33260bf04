// An encoder: token ids, mel frames or samples in, states that a decoder attends to out.
#pragma once

#include "model/layer.h"

namespace slimrt {

class Encoder {
  public:
    /// rope, n_batch: as of the decoder. All must outlive it.
    Encoder(Backend& backend, const ModelConfig& config, const Weights& weights, const Rope& rope,
            int64_t n_batch)
        : backend_(backend), config_(config), weights_(weights), rope_(rope), n_batch_(n_batch) {}

    /// Rows of output that an input of this many rows gives; 0 if it is too short for the convolutions.
    int64_t rows_of(int64_t n_inputs) const;
    /// The longest input that gives no more than this many rows.
    int64_t inputs_of(int64_t n_rows) const;

    /// First rows of layers: x [n, d_model] of ids [1, n], of an input [rows, n_inputs], or of embeddings.
    void embed(Tensor ids, Tensor x) const;
    void convolve(Tensor input, Scratch& scratch, Tensor x) const;
    /// x [n, d_model], inputs of these lengths one after another, becomes the encoder's output. positions:
    /// of each row, ascending in an input.
    /// progress: called, where set, before each layer with the share that is done; may throw.
    using Progress = std::function<void(double done)>;
    void forward(std::span<const int64_t> lengths, std::span<const int32_t> positions, Scratch& scratch,
                 Tensor x, const Progress& progress) const;

  private:
    /// One call of attention after the other, whose results are combined.
    using Calls = std::vector<std::vector<AttentionSequence>>;
    static Calls calls_of(std::span<const int64_t> lengths, std::span<const int32_t> positions);
    void attention(const LayerWeights& w, const Calls& calls, Tensor positions, Scratch& scratch,
                   Tensor x) const;

    Backend& backend_;
    const ModelConfig& config_;
    const Weights& weights_;
    const Rope& rope_;
    int64_t n_batch_;
};

}  // namespace slimrt
