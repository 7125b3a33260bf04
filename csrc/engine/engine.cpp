#include "engine/engine.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <set>

#include "core/error.h"
#include "core/thread_pool.h"
#include "engine/scope_exit.h"
#include "model/architecture.h"

namespace slimrt {
namespace {

std::vector<LayerCache> layer_caches(Decoder& decoder) {
    std::vector<LayerCache> layers;
    for (const auto& [mode, c] : decoder.layers()) {
        std::string types;
        for (const Plane& plane : mode->format(c)) {
            const std::string name = dtype_info(plane.type).name;
            if (types.empty())
                types = name;
            else if (plane.name == std::string_view("v") && types != name)
                types += "+" + name;
        }
        layers.push_back({mode->name(), types, c.rank, c.rank > 0 ? dtype_info(c.type_r).name : "",
                          decoder.cache().bytes_per_token(c.layer)});
    }
    return layers;
}

CrossCache cross_cache(Decoder& decoder) {
    const auto& [mode, config] = decoder.cross();
    if (!mode) return {};
    CrossCache cross{mode->name(), dtype_info(config.type_k).name};
    for (int layer = 0; layer < (mode->shared() ? 1 : decoder.config().n_layers); ++layer)
        cross.bytes_per_row += decoder.sources()->bytes_per_token(layer);
    return cross;
}

EngineInfo describe(Decoder& decoder, const Backend& backend, int n_threads) {
    EngineInfo info{decoder.config(),
                    decoder.options(),
                    layer_caches(decoder),
                    cross_cache(decoder),
                    backend.description(),
                    n_threads,
                    {}};
    info.memory.use = backend.memory();
    info.memory.mapped = decoder.mapped_bytes();
    for (const LayerCache& layer : info.layers) info.memory.cache_bytes_per_token += layer.bytes_per_token;
    return info;
}

/// The number of a CUDA device, -1 of the CPU.
int device_number(const std::string& device) {
    constexpr std::string_view kCuda = "cuda";
    if (device == "cpu") return -1;
    if (device == kCuda) return 0;
    int number = 0;
    const char* const end = device.data() + device.size();
    if (device.starts_with("cuda:") &&
        std::from_chars(device.data() + kCuda.size() + 1, end, number) == std::from_chars_result{end, {}} &&
        number >= 0)
        return number;
    fail(ErrorCode::unsupported, "unknown device '", device, "'; there are: cpu, cuda, cuda:1 ...");
}

std::unique_ptr<Backend> open_backend(const EngineOptions& options, int n_threads, bool dry) {
    const int cuda = device_number(options.device);
    return cuda < 0 ? open_cpu_backend({.n_threads = n_threads, .dry = dry}) : open_cuda_backend(cuda, dry);
}

/// What the planner measures of one configuration.
struct Measured {
    EngineInfo info;
    size_t activations, workspace;
    uint64_t available;
};

Measured measure(const GgufFile& file, const EngineOptions& options, const ExtraTensors& extra) {
    if (options.n_threads < 0 || options.n_threads > 1024)
        fail(ErrorCode::argument, "n_threads must be from 1 to 1024 (0: chosen), got ", options.n_threads);
    const int n_threads = options.n_threads ? options.n_threads : default_threads();
    const auto dry = open_backend(options, n_threads, true);
    Decoder decoder(file, options.cache, *dry, extra);
    const size_t activations = measure_scratch(decoder, *dry);
    Measured m{describe(decoder, *dry, n_threads), activations, dry->workspace(), dry->available()};
    m.info.memory.use.scratch += activations;
    return m;
}

std::string gib(uint64_t bytes) {
    char text[32];
    std::snprintf(text, sizeof text, bytes < (1u << 30) ? "%.1f MiB" : "%.2f GiB",
                  double(bytes) / (bytes < (1u << 30) ? 1 << 20 : 1 << 30));
    return text;
}

void require_fit(const Measured& measured, uint64_t limit) {
    const EngineInfo& info = measured.info;
    const uint64_t available = limit ? limit : measured.available;
    const MemoryReport& m = info.memory;
    if (available == 0 || m.total() <= available) return;
    const bool weights_alone = m.mapped + m.use.weights + m.use.derived > available;
    throw Error(
        ErrorCode::wont_fit,
        concat("needs ", gib(m.total()), ", ", gib(available), limit ? " allowed" : " free", ": weights ",
               gib(m.mapped + m.use.weights), ", derived weights ", gib(m.use.derived), ", cache ",
               gib(m.use.cache), " (", info.cache.n_ctx, " tokens x ", m.cache_bytes_per_token, " bytes x ",
               info.cache.n_seqs, " sequences), scratch ", gib(m.use.scratch),
               weights_alone
                   ? ". The weights alone do not fit: try a smaller or more quantised model"
                   : ". Try a smaller context (--ctx) or another cache mode (slimrt plan shows what fits)"),
        m.total(), available);
}

}  // namespace

uint64_t available_on(const std::string& device) {
    return open_backend({.device = device}, 1, true)->available();
}

EngineInfo plan(const GgufFile& file, const EngineOptions& options) {
    return measure(file, options, {}).info;
}

Engine::Engine(const std::string& path, const EngineOptions& options, const ExtraTensors& extra)
    : file_(GgufFile::open(path)) {
    const Measured measured = measure(file_, options, extra);
    require_fit(measured, options.memory_limit);
    n_threads_ = measured.info.n_threads;
    backend_ = open_backend(options, n_threads_, false);
    backend_->reserve_workspace(measured.workspace);
    decoder_ = std::make_unique<Decoder>(file_, options.cache, *backend_, extra);
    scratch_ = Scratch(*backend_, measured.activations);
}

EngineInfo Engine::info() { return describe(*decoder_, *backend_, n_threads_); }

void Engine::require_valid(std::span<const Item> items) {
    std::set<int> seen;
    std::vector<std::pair<int, int64_t>> growth;
    for (const Item& item : items) {
        if (item.tokens.empty()) fail(ErrorCode::argument, "nothing to append: an item has no tokens");
        if (!seen.insert(item.sequence).second)
            fail(ErrorCode::argument, "sequence ", item.sequence, " is listed twice in one append");
        if (decoder_->encoder() && !source_of_.count(item.sequence))
            fail(ErrorCode::argument, "sequence ", item.sequence, " has no source: encode one first");
        for (const int32_t token : item.tokens)
            if (token < 0 || token >= config().n_vocab)
                fail(ErrorCode::argument, "token ", token, " is outside the vocabulary of ",
                     config().n_vocab);
        growth.emplace_back(item.sequence, item.tokens.size());
    }
    cache().require_room(growth);
}

Step Engine::next_step(std::span<const Item> items, Cursor& at, bool all_logits) {
    const CacheOptions& o = decoder_->options();
    const int64_t longest = decoder_->longest_step();
    Step step(cache());
    while (at.item < items.size() && int(step.n_sequences()) < o.n_seqs) {
        const auto [id, tokens] = items[at.item];
        const int64_t left = tokens.size() - at.token, room = o.n_batch - int64_t(step.tokens.size());
        // Where long steps pay, what does not fit beside others is a step of its own.
        if (room == 0 || (left > room && longest > o.n_batch && room < o.n_batch)) break;
        const int64_t n = std::min(left, room == o.n_batch ? longest : room);
        step.add_sequence(cache(), id, n);
        if (KvCache* sources = decoder_->sources()) {
            const int source = source_of_.at(id);
            step.add_source(sources->length(source), sources->table(source, 0));
        }
        for (int64_t i = 0; i < n; ++i, ++at.token) {
            if (all_logits || at.token + 1 == tokens.size())
                step.outputs.push_back(int32_t(step.tokens.size()));
            step.tokens.push_back(tokens[at.token]);
        }
        if (at.token == tokens.size()) at = {at.item + 1, 0};
        if (n >= o.n_batch) break;
    }
    return step;
}

void Engine::append(std::span<const Item> items, bool all_logits, Output output, float* out,
                    const Progress& progress) {
    require_valid(items);
    std::vector<std::pair<int, int64_t>> before;
    int64_t total = 0, done = 0;
    for (const Item& item : items) {
        before.emplace_back(item.sequence, cache().length(item.sequence));
        total += int64_t(item.tokens.size());
    }
    using Clock = std::chrono::steady_clock;
    Clock::time_point reported = Clock::now();
    auto report = [&](int64_t so_far) {
        reported = Clock::now();
        if (progress) progress(so_far, total);
    };
    const int64_t row_of_output = output == Output::logits ? config().n_vocab : config().d_model;
    int64_t in_step = 0;
    decoder_->poll = [&](double share) {
        if (Clock::now() - reported > std::chrono::milliseconds(200)) report(done + int64_t(share * in_step));
    };
    const ScopeExit no_poll([&] { decoder_->poll = nullptr; });
    try {
        for (Cursor at; at.item < items.size();) {
            size_t item = at.item;
            const Step step = next_step(items, at, all_logits);
            in_step = int64_t(step.tokens.size());
            run_step(*decoder_, *backend_, scratch_, step, output, out);
            for (const AttentionSequence& s : step.groups[0].sequences)
                cache().commit(items[item++].sequence, s.n_queries);
            if (out) out += step.outputs.size() * row_of_output;
            done += in_step;
            report(done);
        }
    } catch (...) {
        for (const auto& [id, length] : before) cache().truncate(id, length);
        throw;
    }
}

void Engine::attention_inputs(std::span<const int32_t> tokens, float* out, const Progress& progress) {
    const int64_t n = int64_t(tokens.size()), d = config().d_model;
    const int sequence = cache().create();
    std::vector<int64_t> filled(config().n_layers, 0);
    decoder_->observe_attention = [&](int layer, Tensor x) {
        backend_->download(out + (layer * n + filled[layer]) * d, x, x.bytes());
        filled[layer] += x.rows;
    };
    const ScopeExit finish([&] {
        decoder_->observe_attention = nullptr;
        cache().release(sequence);
    });
    std::vector<float> last(config().n_vocab);
    const Item item{sequence, tokens};
    append({&item, 1}, false, Output::logits, last.data(), progress);
}

std::string Engine::cache_fingerprint() {
    std::string text = concat("slimrt rows 2 ", config().architecture->name, " ", config().n_layers);
    for (int layer = 0; layer < config().n_layers; ++layer) {
        for (const Plane& plane : cache().format(layer))
            text += concat(" ", plane.name, ":", plane.heads, "x", plane.width / plane.heads, ":",
                           dtype_info(plane.type).name);
        if (const uint64_t fold = decoder_->fold_of_rows(layer)) text += concat(" fold:", fold);
    }
    return text;
}

// Saved rows: fingerprint length, fingerprint, token count, rows.
std::vector<std::byte> Engine::save_sequence(int sequence) {
    if (decoder_->encoder())
        fail(ErrorCode::unsupported,
             "sequences with a source cannot be saved: encode the source again instead");
    const std::string fingerprint = cache_fingerprint();
    const uint64_t head[2] = {fingerprint.size(), uint64_t(cache().length(sequence))};
    const std::vector<std::byte> rows = cache().save(sequence);
    std::vector<std::byte> out(sizeof head + fingerprint.size());
    std::memcpy(out.data(), head, sizeof head);
    std::memcpy(out.data() + sizeof head, fingerprint.data(), fingerprint.size());
    out.insert(out.end(), rows.begin(), rows.end());
    return out;
}

int Engine::load_sequence(std::span<const std::byte> bytes) {
    uint64_t head[2];
    const std::string expected = cache_fingerprint();
    if (bytes.size() < sizeof head) fail(ErrorCode::format, "the saved sequence is truncated");
    std::memcpy(head, bytes.data(), sizeof head);
    bytes = bytes.subspan(sizeof head);
    if (head[0] > bytes.size())
        fail(ErrorCode::format, "the saved sequence is truncated or not one of slimrt's");
    const std::string found(reinterpret_cast<const char*>(bytes.data()), head[0]);
    if (found != expected)
        fail(ErrorCode::format, "the saved sequence is of another model or cache: it has '", found,
             "', this is '", expected, "'");
    if (head[1] > uint64_t(cache().n_ctx()))
        fail(ErrorCode::context_overflow, "the saved sequence has ", head[1], " tokens, n_ctx is ",
             cache().n_ctx());
    return cache().restore(bytes.subspan(head[0]), int64_t(head[1]));
}

}  // namespace slimrt
