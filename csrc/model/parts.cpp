#include "model/parts.h"

#include <algorithm>

#include "core/error.h"
#include "model/architecture.h"

namespace slimrt {
namespace {

/// A layer that reads an owner's rows joins the spans from that owner on.
std::vector<LayerSpan> spans_of(const std::vector<LayerChoice>& layers) {
    std::vector<LayerSpan> spans;
    for (const LayerChoice& layer : layers) {
        spans.push_back({layer.config.layer, layer.config.layer + 1});
        while (spans.back().begin > layer.owner) spans.pop_back(), spans.back().end = layer.config.layer + 1;
    }
    return spans;
}

Rope load_rope(Part& part, const ModelConfig& config, const RopeFrequencies& frequencies, int64_t n) {
    const int n_rot = 2 * (frequencies.unrotated + int(frequencies.pairs.size()));
    Backend& backend = *part.backend;
    part.tables.push_back(backend.alloc(MemoryKind::derived, n * n_rot * sizeof(float), "RoPE table"));
    const Tensor table(part.tables.back().data.get(), DType::F32, n, n_rot);
    constexpr int64_t kRows = 4096;  // at a time: the whole table of a long context would be there twice
    for (int64_t first = 0; first < n && !backend.dry(); first += kRows) {
        const Tensor rows = table.rows_of(first, std::min(kRows, n - first));
        backend.upload(rows, frequencies.table(first, rows.rows).data(), rows.bytes());
    }
    const int first = config.latent ? config.head_dim - n_rot : 0;  // MLA rotates the last columns of a head
    return {table, n_rot, config.architecture->positions == Positions::rope_interleaved, first};
}

}  // namespace

std::vector<Part> parts_of(const ModelConfig& config, const std::vector<LayerChoice>& layers,
                           std::span<const BackendLayers> shares) {
    const std::vector<LayerSpan> spans = spans_of(layers);
    if (shares.size() > 1 && (config.architecture->encoder != EncoderKind::none || config.d_layer_embd))
        fail(ErrorCode::unsupported, "layers of architecture '", config.architecture->name,
             "' read what other devices would have: choose one device for all");
    std::vector<Part> parts;
    auto span = spans.begin();
    int end = 0;
    for (const auto& [backend, n] : shares) {
        parts.push_back({backend, {}, {}, {}, {}, {}});
        for (end += n; span != spans.end() && span->begin < end; ++span) parts.back().spans.push_back(*span);
        if (parts.back().spans.empty() && !spans.empty())
            fail(ErrorCode::unsupported, "layers ", end - n, " to ", end - 1, " share rows with layer ",
                 std::prev(span)->begin, " and are where that is: choose other numbers of layers");
    }
    return parts;
}

void load_ropes(Part& part, const ModelConfig& config, const GgufFile& file, int64_t n_ctx, int64_t n) {
    for (const RopeConfig& rope : config.ropes) {
        RopeFrequencies frequencies = rope_frequencies(config, rope, file, n_ctx);
        part.ropes.push_back(load_rope(part, config, frequencies, n));
        frequencies.temperature_scale = config.temperature_scale;
        frequencies.temperature_length = config.temperature_length;
        if (config.latent) frequencies.unrotated = (config.head_dim - rope.n_rot) / 2;
        const bool others = frequencies.temperature_scale;
        part.query_ropes.push_back(others ? load_rope(part, config, frequencies, n) : part.ropes.back());
    }
}

}  // namespace slimrt
