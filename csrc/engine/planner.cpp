#include "engine/planner.h"

#include <algorithm>
#include <array>
#include <ranges>
#include <set>

#include "core/error.h"
#include "core/processors.h"
#include "core/sizes.h"
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
        if (mode->has_levels()) types = to_text(c.levels, mode->default_levels());
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

/// Bytes of scratch, for each part, that are enough for any step: runs the largest steps on dry backends,
/// whose workspaces then are enough, too.
std::vector<size_t> measure_scratch(Decoder& decoder) {
    const CacheOptions& o = decoder.options();
    const int64_t tokens = std::min<int64_t>(o.n_batch, o.n_ctx * o.n_seqs);
    const int64_t longest = std::min<int64_t>(o.n_batch, o.n_ctx);  // of one sequence
    // Attention's memory grows with a sequence's tokens and with the rows that it reads. So each step here
    // has as many tokens as a step can have, and one sequence that is a mode's worst case; one has many
    // chunks. No legal step needs more, though not each of these is legal.
    std::set<std::array<int64_t, 3>> extremes;
    for (const std::vector<LayerChoice>* choices : {&decoder.layers(), &decoder.cross()})
        for (const LayerChoice& choice : *choices)
            for (const Extreme& extreme : choice.mode->extremes(choice.config, tokens, longest, o.n_ctx))
                extremes.insert({tokens, extreme.n, extreme.cached});
    if (const int64_t n = decoder.step_limits().longest; n > o.n_batch) extremes.insert({n, n, o.n_ctx - 1});
    std::vector<Scratch> scratches(decoder.parts().size());
    const int empty = decoder.cache().create();
    decoder.cache().count_recoding();
    for (const auto& [n_tokens, n, cached] : extremes) {
        Step step(decoder.cache());
        step.tokens.resize(n_tokens);
        step.positions = step.outputs = step.tokens;
        for (size_t g = 0; g < step.groups.size(); ++g) {
            const int64_t begin = decoder.cache().begin(int(g), cached);
            const AttentionSequence all{
                .n_queries = int(n), .position = cached, .begin = begin, .end = cached};
            AttentionSequence old = all;  // as Step::add_sequence() has older rows
            old.fresh = old.causal = false;
            step.groups[g] = {step.tokens, {all}, {}};
            for (const Region& region : decoder.cache().regions_of(empty, int(g)))
                step.groups[g].older.push_back({region.c, region.origin, {old}});
            step.groups[g].older.pop_back();
        }
        if (decoder.encoder()) step.add_encoder_states(o.n_source, nullptr);
        run_step(decoder, scratches, step, Output::logits, nullptr);
    }
    if (decoder.encoder()) {
        const int64_t n = decoder.encoder()->inputs_of(o.n_source);
        // No ids where it reads samples: a file may ask for billions of them.
        const std::vector<int32_t> ids(decoder.config().n_inputs > 0 ? 0 : n);
        Encoding encoding;
        if (decoder.encoder_states()) encoding.slots.resize(o.n_source);
        encoding.add({.ids = ids, .rows = n}, o.n_source);
        run_encoding(decoder, scratches[0], encoding, nullptr);
    }
    std::vector<size_t> peaks;
    for (const Scratch& scratch : scratches) peaks.push_back(scratch.peak());
    return peaks;
}

/// The layers that devices share: the decoder's, or those of an encoder that is all.
int n_shared(const ModelConfig& c) { return c.n_layers > 0 ? c.n_layers : c.n_encoder_layers; }

/// whose: begins the message where several devices are used.
void require_fit(const EngineInfo& info, const MemoryReport& m, const std::string& whose, uint64_t available,
                 const char* what) {
    if (available == 0 || m.total() <= available) return;
    // Else the context or the mode is too large.
    const bool weights_alone = m.mapped + m.use.weights > available;
    int64_t rows = 0;  // of one sequence
    for (const LayerCache& layer : info.layers) rows = std::max(rows, layer.max_rows);
    const CacheOptions& cache = info.cache;
    const std::string kept = rows < cache.n_ctx ? concat(rows, " of ", cache.n_ctx) : concat(rows);
    const bool by_sequences = cache.cache_tokens == cache.n_ctx * cache.n_seqs;
    const std::string tokens = by_sequences ? kept : concat(cache.cache_tokens);
    const char* many = cache.n_seqs == 1 ? " sequence" : " sequences";
    const auto [needed, there] = format_both(m.total(), available);
    throw Error(
        ErrorCode::wont_fit,
        concat(whose, "needs ", needed, ", ", there, what, ": weights ",
               format_bytes(m.mapped + m.use.weights), ", derived weights ", format_bytes(m.use.derived),
               ", cache ", format_bytes(m.use.cache), " (", tokens, " tokens x ", m.cache_bytes_per_token,
               " bytes", by_sequences ? concat(" x ", cache.n_seqs, many) : "", "), scratch ",
               format_bytes(m.use.scratch),
               !whose.empty() ? ". Try fewer layers there"
               : weights_alone
                   ? ". The weights alone do not fit: try a smaller or more quantised model"
                   : ". Try a smaller context (--ctx) or another cache mode (slimrt plan shows what fits)"),
        m.total(), available);
}

}  // namespace

std::vector<std::unique_ptr<Backend>> open_backends(std::span<const DeviceLayers> devices, int n_threads,
                                                    bool dry) {
    std::vector<std::unique_ptr<Backend>> backends;
    for (const DeviceLayers& one : devices) backends.push_back(open_backend(one.device, n_threads, dry));
    return backends;
}

std::vector<BackendLayers> shares_of(std::span<const DeviceLayers> devices,
                                     std::span<const std::unique_ptr<Backend>> backends) {
    std::vector<BackendLayers> shares;
    for (size_t i = 0; i < devices.size(); ++i) shares.push_back({backends[i].get(), devices[i].layers});
    return shares;
}

EngineInfo describe(Decoder& decoder, std::span<const DeviceLayers> devices, int n_threads) {
    EngineInfo info{decoder.config(),
                    decoder.options(),
                    layer_caches(decoder),
                    cross_cache(decoder),
                    "",
                    n_threads,
                    {},
                    {}};
    info.cache.sparse_delta = 0;  // what the layers use, where the file's was asked for
    for (const LayerChoice& layer : decoder.layers())
        info.cache.sparse_delta = std::max(info.cache.sparse_delta, layer.config.sparse_delta);
    for (size_t i = 0; i < devices.size(); ++i) {
        const Part& part = decoder.parts()[i];
        MemoryReport memory{part.backend->memory(), decoder.mapped_bytes(part)};
        for (int layer = part.begin(); layer < part.end(); ++layer)
            memory.cache_bytes_per_token += info.layers[layer].bytes_per_token;
        info.parts.push_back({devices[i].device, part.begin(), part.end(), memory});
        info.memory += memory;
    }
    for (size_t i = devices.size(); i-- > 0;) {  // device of the head first
        const Part& part = decoder.parts()[i];
        info.device += (info.device.empty() ? "" : "; ") + part.backend->description();
        if (devices.size() > 1) info.device += concat(": layers ", part.begin(), " to ", part.end() - 1);
    }
    return info;
}

Measured measure(const GgufFile& file, const EngineOptions& options, const ExtraTensors& extra) {
    if (options.n_threads < 0 || options.n_threads > 1024)
        fail(ErrorCode::argument, "n_threads must be from 1 to 1024 (0: chosen), got ", options.n_threads);
    const int n_threads = options.n_threads ? options.n_threads : default_threads();
    const std::vector<DeviceLayers> devices = share_layers(options.device, n_shared(read_config(file)));
    const auto dry = open_backends(devices, n_threads, true);
    Decoder decoder(file, options.cache, shares_of(devices, dry), extra);
    const std::vector<size_t> activations = measure_scratch(decoder);
    Measured m{describe(decoder, devices, n_threads), devices, activations, {}, {}};
    for (size_t i = 0; i < dry.size(); ++i) {
        m.workspaces.push_back(dry[i]->workspace());
        m.available.push_back(dry[i]->available());
        m.info.parts[i].memory.use.scratch += activations[i];
        m.info.memory.use.scratch += activations[i];
    }
    return m;
}

void require_fit(const Measured& measured, uint64_t limit) {
    const EngineInfo& info = measured.info;
    if (limit) return require_fit(info, info.memory, "", limit, " allowed");
    for (size_t i = 0; i < info.parts.size(); ++i) {
        const auto& [device, begin, end, memory] = info.parts[i];
        const bool all = info.parts.size() == 1;
        const std::string whose = all ? "" : concat(device, ", layers ", begin, " to ", end - 1, ": ");
        require_fit(info, memory, whose, measured.available[i], " free");
    }
}

EngineInfo plan(const GgufFile& file, const EngineOptions& options) {
    return measure(file, options, {}).info;
}

std::map<std::string, Tensor> plan_matrices(const GgufFile& file, const CacheOptions& options) {
    const std::vector<DeviceLayers> devices = share_layers("cpu", n_shared(read_config(file)));
    const auto dry = open_backends(devices, 1, true);
    return Decoder(file, options, shares_of(devices, dry)).matrices();
}

}  // namespace slimrt
