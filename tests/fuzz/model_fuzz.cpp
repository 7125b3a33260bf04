// libFuzzer target: parses bytes as a GGUF file, or as shards of one where another begins in them, touches
// everything a valid one hands out, and plans the model in it: configuration, weights, caches, the steps of a
// dry run. The last bytes choose the options.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/gguf.h"
#include "engine/planner.h"

namespace {

using slimrt::EngineOptions;

volatile unsigned char sink;

void touch(const std::byte* data, size_t bytes) {
    if (bytes == 0) return;
    sink = static_cast<unsigned char>(data[0]);
    sink = static_cast<unsigned char>(data[bytes - 1]);
}

/// Runs what may refuse its input, but only with Error.
template <class Attempt>
void attempt(const Attempt& attempted) {
    try {
        attempted();
    } catch (const slimrt::Error&) {
    }
}

void touch_everything(const slimrt::GgufFile& file) {
    for (const auto& [key, value] : file.metadata()) {
        const std::string& name = key;
        attempt([&] { file.integer(name, -1000, 1000); });
        attempt([&] { file.number(name); });
        attempt([&] { file.string(name); });
        const auto* array = std::get_if<slimrt::GgufArray>(&value);
        if (!array) continue;
        for (const slimrt::GgufValue& element : slimrt::elements(*array)) {
            const auto* text = std::get_if<std::string_view>(&element);
            if (text) touch(reinterpret_cast<const std::byte*>(text->data()), text->size());
        }
    }
    for (const auto& [name, tensor] : file.tensors()) {
        if (tensor.rows < 1 || tensor.cols < 1) __builtin_trap();
        touch(tensor.data, tensor.bytes());
    }
}

/// The last bytes of the input, each of which picks one of several values.
struct Tail {
    static constexpr size_t kBytes = 14;
    const uint8_t* next;

    template <class Values>
    auto pick(const Values& values) {
        return values[*next++ % std::size(values)];
    }
};

std::vector<std::string> mode_names(bool cross) {
    std::vector<std::string> names = {"auto", "none such"};
    for (const slimrt::CacheMode* mode : slimrt::cache_modes(cross)) names.emplace_back(mode->name());
    return names;
}

std::vector<std::string> type_names() {
    std::vector<std::string> names = {"auto", ""};
    int n = 0;
    for (const slimrt::CacheType* types = slimrt::cache_types(&n); n > 0; --n)
        names.emplace_back(slimrt::dtype_info(types[n - 1].dtype).name);
    return names;
}

EngineOptions read_options(Tail tail) {
    static const std::vector<std::string> modes = mode_names(false), cross = mode_names(true),
                                          types = type_names();
    constexpr int64_t kContexts[] = {0, 1, 33, 1024, 1 << 20, 1 << 30, int64_t(1) << 62, -1};
    constexpr int64_t kSources[] = {0, 1, 100, 1500, -1};
    constexpr int kRanks[] = {-1, 0, 1, 3, 1 << 30}, kSequences[] = {1, 2, 9, 1 << 30, 0};
    constexpr int kBatches[] = {512, 32, 1024, 0};
    constexpr float kThresholds[] = {0, 0.01f, 1};
    EngineOptions o;
    o.n_threads = 1 + *tail.next++ % 8;
    o.cache.mode.all = tail.pick(modes);
    const bool by_layer = *tail.next++ % 4 == 1;
    const std::string first = tail.pick(modes);
    if (by_layer) o.cache.mode.each = {first, o.cache.mode.all};
    o.cache.type_k.all = tail.pick(types);
    o.cache.type_v.all = o.cache.residual_type.all = tail.pick(types);
    o.cache.cross = tail.pick(cross);
    o.cache.rank.all = tail.pick(kRanks);
    o.cache.n_ctx = tail.pick(kContexts);
    o.cache.n_seqs = tail.pick(kSequences);
    o.cache.n_source = tail.pick(kSources);
    o.cache.n_batch = tail.pick(kBatches);
    o.cache.sparse_threshold = tail.pick(kThresholds);
    return o;
}

/// The file, cut into shards where the magic stands at a multiple of 32.
slimrt::GgufFile parse(const std::byte* file, size_t bytes) {
    constexpr size_t kAlignment = 32;
    const auto begins = [&](size_t at) { return bytes - at >= 4 && std::memcmp(file + at, "GGUF", 4) == 0; };
    std::vector<slimrt::GgufFile> shards;
    for (size_t begin = 0, end = kAlignment;; end += kAlignment) {
        if (end < bytes && !begins(end)) continue;
        end = std::min(end, bytes);
        shards.push_back(slimrt::GgufFile::parse(file + begin, end - begin, "fuzz.gguf"));
        if (end == bytes) return slimrt::GgufFile::join(std::move(shards));
        begin = end;
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size < Tail::kBytes) return 0;
    // A copy of its own, so that reading past the file is seen, and aligned as a mapped file is.
    const size_t bytes = size - Tail::kBytes;
    const std::unique_ptr<std::byte[]> file(new std::byte[bytes]);
    if (bytes > 0) std::memcpy(file.get(), data, bytes);
    attempt([&] {
        const slimrt::GgufFile gguf = parse(file.get(), bytes);
        touch_everything(gguf);
        plan(gguf, read_options({data + bytes}));
    });
    return 0;
}
