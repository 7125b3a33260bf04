// The tensors of a model, checked: each is required, declared optional, or refused by name.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "cache/cache_mode.h"
#include "core/gguf.h"
#include "model/config.h"

namespace slimrt {

struct Norm {
    Tensor weight, bias;
};

struct LayerWeights {
    Norm attn_norm, ffn_norm;            // of the inputs, or none
    Norm attn_post_norm, ffn_post_norm;  // of the outputs, or none
    AttnWeights attn;
    Tensor gate, up, down;
    Tensor gate_bias, up_bias, down_bias;
};

struct Weights {
    Tensor token_embd, position_embd, output, output_bias;
    Norm output_norm;
    std::vector<LayerWeights> layers;
    std::vector<Buffer> owned;  // what could not be used in place
    uint64_t mapped = 0;        // bytes read in place from the file
};

/// Tensors a caller brings along, by name: float32 [rows, cols] that must outlive the loading.
using ExtraTensors = std::map<std::string, Tensor>;

/// One layer's attention as its cache mode sees it.
AttnConfig attention_config(const ModelConfig& config, int layer, DType type_k, DType type_v);

/// Reads weights in place where the backend multiplies with their type, else unpacks them to f16 (norms and
/// biases to f32), and prepares each layer for its mode. Throws Error{format} for a missing or misshapen
/// tensor, Error{unsupported} for one nobody asked for.
Weights load_weights(const GgufFile& file, const ModelConfig& config, Backend& backend,
                     const std::vector<const CacheMode*>& modes, const std::vector<AttnConfig>& attn,
                     const ExtraTensors& extra);

}  // namespace slimrt
