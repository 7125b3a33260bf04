// Which backend computes which layers, and the tables that these share there.
#pragma once

#include <span>
#include <vector>

#include "model/cache_choice.h"

namespace slimrt {

/// Layers [begin, end) none of whose rows are read by others.
struct LayerSpan {
    int begin, end;
};

/// How many layers a backend is to compute, at least one.
struct BackendLayers {
    Backend* backend;
    int layers;
};

/// Neighbouring layers on one backend, and what they have in common there beside weights and rows.
struct Part {
    Backend* backend;
    std::vector<LayerSpan> spans;
    std::vector<Rope> ropes, query_ropes;  // of ModelConfig::ropes: of k, and of q
    std::vector<Buffer> tables;
    Scratch recoding;  // of rows that change their class

    int begin() const { return spans.front().begin; }
    int end() const { return spans.back().end; }
};

/// Layers in their order, a part for each share; a span is where its first layer is. Throws
/// Error{unsupported} where a share is left without, or all parts need what only one can have.
std::vector<Part> parts_of(const ModelConfig& config, const std::vector<LayerChoice>& layers,
                           std::span<const BackendLayers> shares);

/// Tables of so many positions.
void load_ropes(Part& part, const ModelConfig& config, const GgufFile& file, int64_t n_ctx, int64_t n);

}  // namespace slimrt
