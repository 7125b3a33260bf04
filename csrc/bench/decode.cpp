#include "bench/decode.h"

#include <algorithm>
#include <chrono>

#include "cache/cache_mode.h"
#include "core/error.h"
#include "core/thread_pool.h"
#include "engine/engine.h"

namespace slimrt::bench {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

class Text {
  public:
    explicit Text(Engine& engine) : engine_(engine), id_(engine.create()), logits_(engine.config().n_vocab) {}
    ~Text() { engine_.release(id_); }
    Text(const Text&) = delete;
    Text& operator=(const Text&) = delete;

    /// Appends tokens; the likeliest next one.
    int32_t append(std::span<const int32_t> tokens) {
        const Engine::Item item{id_, tokens, 1};
        engine_.append({&item, 1}, Output::logits, logits_.data(), {});
        return int32_t(std::ranges::max_element(logits_) - logits_.begin());
    }
    /// Lengthens it to whole blocks that are about `depth` tokens.
    void tile(int64_t depth) {
        constexpr int64_t kStep = KvCache::kBlockTokens;
        if (depth / kStep * kStep > engine_.length(id_)) engine_.tile(id_, depth / kStep * kStep);
    }
    int64_t length() { return engine_.length(id_); }

  private:
    Engine& engine_;
    int id_;
    std::vector<float> logits_;
};

Json timed(Engine& engine, const Run& run) {
    Text(engine).append(run.prompt);  // weights are in memory from then on
    Text text(engine);
    auto start = Clock::now();
    int32_t next = text.append(run.prompt);
    const double prompt_seconds = seconds_since(start);
    if (run.depth > 0) text.tile(run.depth);
    const int64_t depth = text.length();
    std::vector<int32_t> tokens{next};
    start = Clock::now();
    for (int64_t i = 1; i < run.n; ++i) tokens.push_back(next = text.append({&next, 1}));
    const double seconds = seconds_since(start);
    const MemoryReport memory = engine.info().memory;
    return {{"prompt_tokens", int64_t(run.prompt.size())},
            {"prompt_tok_s", double(run.prompt.size()) / prompt_seconds},
            {"depth", depth},
            {"decode_tok_s", run.n > 1 ? double(run.n - 1) / seconds : 0.0},
            {"weights_bytes", memory.mapped + memory.use.weights + memory.use.derived},
            {"cache_bytes", memory.use.cache},
            {"cache_bytes_per_token", memory.cache_bytes_per_token},
            {"tokens", tokens}};
}

Json decode_with(const Run& run, const std::string& cache) {
    const size_t colon = cache.find(':');
    const std::string mode = cache.substr(0, colon);
    const std::string type = colon == std::string::npos ? "auto" : cache.substr(colon + 1);
    EngineOptions options;
    options.device = run.isa.empty() ? "cpu" : run.isa;
    options.n_threads = run.threads;
    options.cache.mode.all = mode;
    options.cache.type_k.all = options.cache.type_v.all = type;
    options.cache.n_ctx = std::max<int64_t>(run.depth, int64_t(run.prompt.size())) + run.n + 2 * kBlockTokens;
    try {
        Engine engine(GgufFile::open(run.model), options);
        return {{"cache", cache}, {"threads", engine.info().n_threads}, {"run", timed(engine, run)}};
    } catch (const Error& error) {
        if (error.code != ErrorCode::cache_unsupported && error.code != ErrorCode::argument) throw;
        return {{"cache", cache}, {"refused", error.what()}};
    }
}

}  // namespace

std::vector<Json> decode(const Run& run) {
    std::vector<std::string> caches = run.caches;
    if (caches == std::vector<std::string>{"all"}) {
        caches.clear();
        for (const CacheMode* mode : cache_modes(false)) caches.emplace_back(mode->name());
    }
    std::vector<Json> found;
    for (const std::string& cache : caches) found.push_back(decode_with(run, cache));
    return found;
}

}  // namespace slimrt::bench
