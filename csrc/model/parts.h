// Which backend computes which layers, and the tables that these layers share.
#pragma once

#include <span>
#include <vector>

#include "model/cache_choice.h"

namespace slimrt {

/// Layers [begin, end) that share rows with no layer outside, so that a part may begin or end there.
struct LayerSpan {
    int begin, end;
};

/// How many layers a backend computes, at least one; without a decoder, of the encoder's.
struct BackendLayers {
    Backend* backend;
    int layers;
};

/// Neighbouring layers on one backend (a pipeline stage), and what they share beside weights and rows.
struct Part {
    Backend* backend;
    std::vector<LayerSpan> spans;          // none without a decoder
    std::vector<Rope> ropes, query_ropes;  // for k and for q, by index in ModelConfig::ropes
    std::vector<Buffer> tables;
    Scratch recoding;  // for rows that change their class (KvCache)

    int begin() const { return spans.empty() ? 0 : spans.front().begin; }
    int end() const { return spans.empty() ? 0 : spans.back().end; }
};

/// Divides the layers among backends, in order, a part for each share. A span goes where its first layer is.
/// Throws Error{unsupported} where a share gets no layers, or where the architecture needs one device.
std::vector<Part> parts_of(const ModelConfig& config, const std::vector<LayerChoice>& layers,
                           std::span<const BackendLayers> shares);

/// Fills the part's cos and sin tables for n positions; n_ctx selects longrope's factors.
void load_ropes(Part& part, const ModelConfig& config, const GgufFile& file, int64_t n_ctx, int64_t n);

}  // namespace slimrt
