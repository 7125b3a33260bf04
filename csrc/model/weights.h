// The tensors of a model: each is required or optional, and any other in the file is refused by name.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cache/cache_mode.h"
#include "core/gguf.h"
#include "model/config.h"

namespace slimrt {

struct Norm {
    Tensor weight, bias;  // or none
    bool present = false;
};

/// Of a layer with experts.
struct ExpertWeights {
    Tensor router;  // [experts, d_model]
    /// [1, experts], or none; choice_bias counts for the choice of experts alone.
    Tensor router_bias, choice_bias;
    Experts experts;
    Tensor shared_gate, shared_up, shared_down;  // the shared expert, or none
    Tensor shared_weight;                        // [1, d_model]: its gate sigmoid(x w), or none
    // Of experts beside a dense network (Gemma 4): norms of the router's and the experts' input and of both
    // results.
    Norm router_norm, norm, post_norm, dense_post_norm;
};

struct LayerWeights {
    Norm attn_norm, cross_norm, ffn_norm;              // of the inputs, or none
    Norm attn_post_norm, ffn_post_norm;                // of the outputs, or none
    Norm attn_sub_norm, ffn_sub_norm;                  // of the inputs of W_O and W_down, or none
    Norm attn_sum_norm, cross_sum_norm, ffn_sum_norm;  // of x after each sum, or none
    AttnWeights attn, cross;                           // cross: with an encoder
    Norm group_norm;                                   // in an encoder of series: among those of a group
    AttnWeights group;
    /// What cache modes derived from attn and cross, in a decoder. Readers of rows have their owner's.
    std::shared_ptr<const Prepared> attn_prepared, cross_prepared;
    Tensor gate, up, down;
    Tensor gate_bias, up_bias, down_bias;
    ExpertWeights experts;
    float output_scale = 1;       // of the layer's output
    int d_ff = 0;                 // width of a dense network
    Tensor embd_gate, embd_proj;  // per-layer embeddings, or none
    Norm embd_post_norm;
};

struct ConvolutionWeights {
    Tensor weight, bias;  // [channels, width * inputs]
    Norm norm;
};

struct EncoderWeights {
    std::vector<ConvolutionWeights> convolutions;
    Tensor position_embd;
    Norm embd_norm;
    std::vector<LayerWeights> layers;
    Norm output_norm;
};

struct Weights {
    Tensor token_embd, position_embd, output, output_bias;
    float output_scale = 1;  // of the head's input
    Norm embd_norm, output_norm;
    Tensor layer_embd, layer_embd_proj;  // per-layer embeddings, the layers side by side; or none
    Norm layer_embd_norm;
    std::vector<LayerWeights> layers;
    EncoderWeights encoder;
    std::map<std::string, Tensor> matrices;     // of the file, by name, as they are held
    std::vector<Buffer> owned;                  // memory of tensors that are not used in place
    std::map<const Backend*, uint64_t> mapped;  // bytes that each backend reads in place from the file
};

/// Tensors that a caller adds to the file's, by name: float32 [rows, cols], which must outlive the loading.
using ExtraTensors = std::map<std::string, Tensor>;

struct CacheChoices;

/// The AttnConfig of a layer, but for what depends on the cache mode. cross: of its cross-attention, which
/// has no positions.
AttnConfig attention_config(const ModelConfig& config, int layer, bool cross = false);

/// How the names of a decoder layer's tensors begin: "blk.0.", or "dec.blk.0." with an encoder.
std::string block_prefix(const ModelConfig& config, int layer);

/// Loads all tensors, each as its held_type() (norms and biases as f32), and prepares each layer for its
/// cache modes. backends: of each layer; the first also has the embedding, the last the head. Throws
/// Error{format} for a missing or misshapen tensor, Error{unsupported} for one that the model does not use.
Weights load_weights(const GgufFile& file, const ModelConfig& config, std::span<Backend* const> backends,
                     const CacheChoices& choices, const ExtraTensors& extra);

}  // namespace slimrt
