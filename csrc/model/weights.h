// The tensors of a model, checked: each is required, declared optional, or refused by name.
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
    bool there = false;
};

/// Of a layer with experts.
struct ExpertWeights {
    Tensor router;                    // [experts, d_model]
    Tensor router_bias, choice_bias;  // [1, experts], or none
    Experts experts;
    Tensor shared_gate, shared_up, shared_down;  // what every token takes, or none
    Tensor shared_weight;                        // [1, d_model]: gives the logit of its share, or none
    // With norms of their own, beside a dense network: of what the router and the experts read, of both
    // results.
    Norm router_norm, norm, post_norm, dense_post_norm;
};

struct LayerWeights {
    Norm attn_norm, cross_norm, ffn_norm;  // of the inputs, or none
    Norm attn_post_norm, ffn_post_norm;    // of the outputs, or none
    Norm attn_sub_norm, ffn_sub_norm;      // of what W_O and down read, or none
    AttnWeights attn, cross;               // cross: with an encoder
    /// What their modes made of them; of a decoder. Layers that share rows share what reads them.
    std::shared_ptr<const Prepared> attn_prepared, cross_prepared;
    Tensor gate, up, down;
    Tensor gate_bias, up_bias, down_bias;
    ExpertWeights experts;
    float output_scale = 1;       // of the layer's output
    int d_ff = 0;                 // of a dense network
    Tensor embd_gate, embd_proj;  // of embeddings of its own, or none
    Norm embd_post_norm;
};

struct ConvolutionWeights {
    Tensor weight, bias;  // [channels, width * inputs]
    Norm norm;
};

struct EncoderWeights {
    std::vector<ConvolutionWeights> convolutions;
    Tensor position_embd;
    std::vector<LayerWeights> layers;
    Norm output_norm;
};

struct Weights {
    Tensor token_embd, position_embd, output, output_bias;
    float output_scale = 1;  // of what the head reads
    Norm token_embd_norm, output_norm;
    Tensor layer_embd, layer_embd_proj;  // of embeddings that layers have of their own, side by side; or none
    Norm layer_embd_norm;
    std::vector<LayerWeights> layers;
    EncoderWeights encoder;
    std::vector<Buffer> owned;                  // what could not be used in place
    std::map<const Backend*, uint64_t> mapped;  // bytes that each reads in place from the file
};

/// Tensors a caller brings along, by name: float32 [rows, cols] that must outlive the loading.
using ExtraTensors = std::map<std::string, Tensor>;

struct CacheChoices;

/// One layer's attention as a cache mode sees it, but for what depends on the mode. cross: over an encoder's
/// rows, which have no positions.
AttnConfig attention_config(const ModelConfig& config, int layer, bool cross = false);

/// What the tensors of a decoder's layer begin with: "blk.0.", or "dec.blk.0." with an encoder.
std::string block_prefix(const ModelConfig& config, int layer);

/// Reads weights in place where the backend multiplies with their type, else unpacks them to f16 (norms and
/// biases to f32), and prepares each layer for its modes. backends: of each layer; the first one's has what
/// goes before the layers, the last one's the head. Throws Error{format} for a missing or misshapen tensor,
/// Error{unsupported} for one nobody asked for.
Weights load_weights(const GgufFile& file, const ModelConfig& config, std::span<Backend* const> backends,
                     const CacheChoices& choices, const ExtraTensors& extra);

}  // namespace slimrt
