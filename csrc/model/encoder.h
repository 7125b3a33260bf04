// An encoder: token ids, mel frames, samples or patches of series in; out the states that a decoder's
// cross-attention reads, or a forecast is made of.
#pragma once

#include "model/layer.h"

namespace slimrt {

class Encoder {
  public:
    /// rope and n_batch: the decoder's. All arguments must outlive the encoder.
    Encoder(Backend& backend, const ModelConfig& config, const Weights& weights, const Rope& rope,
            int64_t n_batch)
        : backend_(backend), config_(config), weights_(weights), rope_(rope), n_batch_(n_batch) {}

    /// Rows of output for an input of n_inputs rows; 0 if that is too short for the convolutions.
    int64_t rows_of(int64_t n_inputs) const;
    /// The longest input, in rows, that gives no more than n_rows rows of output.
    int64_t inputs_of(int64_t n_rows) const;

    /// What forward() reads, x [n, d_model]: of token ids [1, n], or of an input [rows, channels].
    void embed(Tensor ids, Tensor x) const;
    void convolve(Tensor input, Scratch& scratch, Tensor x) const;
    /// x [n, d_model], embeddings of inputs of these lengths, becomes the encoder's output. positions: of
    /// each row, ascending within an input; of a group of series within each of them. progress, where set, is
    /// called before each layer with the fraction that is done, 0 to 1, and may throw.
    using Progress = std::function<void(double done)>;
    void forward(std::span<const int64_t> lengths, std::span<const int32_t> positions, Scratch& scratch,
                 Tensor x, const Progress& progress) const;

  private:
    /// Attention calls one after another, whose results are merged by log-sum-exp.
    using Calls = std::vector<std::vector<AttentionSequence>>;
    Calls calls_of(std::span<const int64_t> lengths, std::span<const int32_t> positions) const;
    /// Rows of each input in the order of their positions: those of a group of series at one time together.
    struct Instants {
        Tensor order, places;  // the row at each place, and the place of each row [1, n]; none: as they are
        Calls calls;           // among the rows of an instant
        bool alone = false;    // each row is the only one of its instant
    };
    Instants instants_of(std::span<const int64_t> lengths, std::span<const int32_t> positions,
                         Scratch& scratch) const;
    void attention(const Norm& in_norm, const AttnWeights& w, const Calls& calls, Tensor positions,
                   Scratch& scratch, Tensor x) const;
    void attention_alone(const Norm& in_norm, const AttnWeights& w, Scratch& scratch, Tensor x) const;
    void group_attention(const LayerWeights& w, const Instants& instants, Scratch& scratch, Tensor x) const;

    Backend& backend_;
    const ModelConfig& config_;
    const Weights& weights_;
    const Rope& rope_;
    int64_t n_batch_;
};

}  // namespace slimrt
