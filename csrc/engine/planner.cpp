#include "engine/planner.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <set>

#include "core/error.h"
#include "core/processors.h"
#include "engine/step.h"

namespace slimrt {
namespace {

std::vector<LayerCache> layer_caches(Decoder& decoder) {
    const KvCache& cache = decoder.cache();
    std::vector<LayerCache> layers;
    for (const auto& [mode, c, owner, shared, rotates] : decoder.layers()) {
        std::string types;
        const std::vector<Format> older = mode->older_formats(c);
        for (const Plane& plane : older.empty() ? mode->format(c) : older.back()) {
            const std::string name = dtype_info(plane.type).name;
            if (types.empty())
                types = name;
            else if (plane.name == std::string_view("v") && types != name)
                types += "+" + name;
        }
        if (mode->has_levels()) types = to_text(c.levels, mode->usual_levels());
        layers.push_back({mode->name(), types, c.rank, c.rank > 0 ? dtype_info(c.type_r).name : "",
                          cache.bytes_per_token(c.layer), cache.max_rows(c.layer),
                          cache.bytes_held(c.layer, cache.n_ctx()), c.v_heads});
    }
    return layers;
}

CrossCache cross_cache(Decoder& decoder) {
    if (decoder.cross().empty()) return {};
    const LayerChoice& first = decoder.cross()[0];
    CrossCache cross{first.mode->name(), dtype_info(first.config.type_k).name};
    for (int layer = 0; layer < decoder.config().n_layers; ++layer)
        cross.bytes_per_row += decoder.encoder_states()->bytes_per_token(layer);
    return cross;
}

std::string gib(uint64_t bytes) {
    char text[32];
    std::snprintf(text, sizeof text, bytes < (1u << 30) ? "%.1f MiB" : "%.2f GiB",
                  double(bytes) / (bytes < (1u << 30) ? 1 << 20 : 1 << 30));
    return text;
}

/// Bytes of scratch that no step exceeds: runs the largest on a dry backend, whose workspace afterwards is
/// what no step exceeds either.
size_t measure_scratch(Decoder& decoder, Backend& dry) {
    const CacheOptions& o = decoder.options();
    const int64_t tokens = std::min<int64_t>(o.n_batch, o.n_ctx * o.n_seqs);
    const int64_t longest = std::min<int64_t>(o.n_batch, o.n_ctx);  // of one sequence
    // What attention needs grows with a sequence's tokens and with the rows it reads: each of these has all
    // tokens a step can have, but one sequence that is the worst of its kind for a mode; and there is a step
    // of many chunks. No legal step needs more, though not every one of these is legal itself.
    std::set<std::array<int64_t, 3>> extremes;
    for (const std::vector<LayerChoice>* choices : {&decoder.layers(), &decoder.cross()})
        for (const LayerChoice& choice : *choices)
            for (const Extreme& extreme : choice.mode->extremes(choice.config, longest, o.n_ctx))
                extremes.insert({tokens, extreme.n, extreme.cached});
    if (const int64_t n = decoder.step_limits().longest; n > o.n_batch) extremes.insert({n, n, o.n_ctx - 1});
    Scratch scratch;
    const int empty = decoder.cache().create();
    decoder.cache().rehearse();
    for (const auto& [n_tokens, n, cached] : extremes) {
        Step step(decoder.cache());
        step.tokens.resize(n_tokens);
        step.positions = step.outputs = step.tokens;
        for (size_t g = 0; g < step.groups.size(); ++g) {
            const int64_t begin = decoder.cache().begin(int(g), cached);
            const AttentionSequence all{
                .n_queries = int(n), .position = cached, .begin = begin, .end = cached};
            step.groups[g] = {step.tokens, {all}, {}};
            for (const Region& region : decoder.cache().regions_of(empty, int(g)))
                step.groups[g].older.push_back({region.c, region.origin, {all}});
            step.groups[g].older.pop_back();
        }
        if (decoder.encoder()) step.add_encoder_states(o.n_source, nullptr);
        run_step(decoder, dry, scratch, step, Output::logits, nullptr);
    }
    if (decoder.encoder()) {
        Encoding encoding;
        encoding.slots.resize(o.n_source);
        const int64_t n = decoder.encoder()->inputs_of(o.n_source);
        // None where it reads samples: a file may ask for billions of them.
        const std::vector<int32_t> ids(decoder.config().n_inputs > 0 ? 0 : n);
        encoding.add({.ids = ids, .rows = n}, o.n_source);
        run_encoding(decoder, dry, scratch, encoding, nullptr);
    }
    return scratch.peak();
}

}  // namespace

uint64_t available_on(const std::string& device) { return open_backend(device, 1, true)->available(); }

EngineInfo describe(Decoder& decoder, const Backend& backend, int n_threads) {
    EngineInfo info{decoder.config(),
                    decoder.options(),
                    layer_caches(decoder),
                    cross_cache(decoder),
                    backend.description(),
                    n_threads,
                    {}};
    info.cache.sparse_delta = 0;  // as the file says where it was asked
    for (const LayerChoice& layer : decoder.layers())
        info.cache.sparse_delta = std::max(info.cache.sparse_delta, layer.config.sparse_delta);
    info.memory.use = backend.memory();
    info.memory.mapped = decoder.mapped_bytes();
    for (const LayerCache& layer : info.layers) info.memory.cache_bytes_per_token += layer.bytes_per_token;
    return info;
}

Measured measure(const GgufFile& file, const EngineOptions& options, const ExtraTensors& extra) {
    if (options.n_threads < 0 || options.n_threads > 1024)
        fail(ErrorCode::argument, "n_threads must be from 1 to 1024 (0: chosen), got ", options.n_threads);
    const int n_threads = options.n_threads ? options.n_threads : default_threads();
    const auto dry = open_backend(options.device, n_threads, true);
    Decoder decoder(file, options.cache, *dry, extra);
    const size_t activations = measure_scratch(decoder, *dry);
    Measured m{describe(decoder, *dry, n_threads), activations, dry->workspace(), dry->available()};
    m.info.memory.use.scratch += activations;
    return m;
}

void require_fit(const Measured& measured, uint64_t limit) {
    const EngineInfo& info = measured.info;
    const uint64_t available = limit ? limit : measured.available;
    const MemoryReport& m = info.memory;
    if (available == 0 || m.total() <= available) return;
    const bool weights_alone = m.mapped + m.use.weights + m.use.derived > available;
    int64_t rows = 0;  // of a sequence
    for (const LayerCache& layer : info.layers) rows = std::max(rows, layer.max_rows);
    const CacheOptions& cache = info.cache;
    const std::string kept = rows < cache.n_ctx ? concat(rows, " of ", cache.n_ctx) : concat(rows);
    const bool by_sequences = cache.cache_tokens == cache.n_ctx * cache.n_seqs;
    const std::string tokens = by_sequences ? kept : concat(cache.cache_tokens);
    throw Error(
        ErrorCode::wont_fit,
        concat("needs ", gib(m.total()), ", ", gib(available), limit ? " allowed" : " free", ": weights ",
               gib(m.mapped + m.use.weights), ", derived weights ", gib(m.use.derived), ", cache ",
               gib(m.use.cache), " (", tokens, " tokens x ", m.cache_bytes_per_token, " bytes",
               by_sequences ? concat(" x ", cache.n_seqs, " sequences") : "", "), scratch ",
               gib(m.use.scratch),
               weights_alone
                   ? ". The weights alone do not fit: try a smaller or more quantised model"
                   : ". Try a smaller context (--ctx) or another cache mode (slimrt plan shows what fits)"),
        m.total(), available);
}

EngineInfo plan(const GgufFile& file, const EngineOptions& options) {
    return measure(file, options, {}).info;
}

}  // namespace slimrt
