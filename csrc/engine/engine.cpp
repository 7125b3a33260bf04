#include "engine/engine.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <set>

#include "core/error.h"
#include "core/processors.h"
#include "engine/scope_exit.h"
#include "model/architecture.h"

namespace slimrt {
namespace {

/// Begins the last part of a fingerprint, RoPE's frequencies.
constexpr const char* kRope = " rope:";

/// Precedes saved rows: bytes of the fingerprint; where the rows begin; the sequence's length. In tokens.
struct SavedHead {
    uint32_t fingerprint, begin;
    uint64_t length;
};

/// A hash of RoPE's frequencies and magnitudes, like FNV-1a; longrope chooses them by n_ctx.
uint64_t hash_of_rotation(const ModelConfig& config, const GgufFile& file, int64_t n_ctx) {
    uint64_t hash = 0;
    for (const RopeConfig& rope : config.ropes) {
        RopeFrequencies frequencies = rope_frequencies(config, rope, file, n_ctx);
        frequencies.pairs.push_back(frequencies.magnitude);
        for (const double number : frequencies.pairs)
            hash = (hash ^ std::bit_cast<uint64_t>(number)) * 0x100000001b3 + 1;
    }
    return hash;
}

/// How many of the `left` tokens of an item go into a step that has `taken` tokens of others; 0: none, the
/// step is full. Where long steps pay, tokens that do not fit beside others get a step of their own; so do
/// those whose rows have no slots.
int64_t share_of_step(StepLimits limits, int64_t n_batch, int64_t taken, int64_t left) {
    if (taken == 0) return std::min(left, limits.longest);
    const bool long_steps_pay = limits.longest > n_batch || limits.stored < n_batch;
    const int64_t room = n_batch - taken;
    return long_steps_pay && left > std::min(room, limits.stored) ? 0 : std::min(left, room);
}

}  // namespace

Engine::Engine(GgufFile file, const EngineOptions& options, const ExtraTensors& extra)
    : file_(std::move(file)) {
    const Measured measured = measure(file_, options, extra);
    require_fit(measured, options.memory_limit);
    n_threads_ = measured.info.n_threads;
    devices_ = measured.devices;
    backends_ = open_backends(devices_, n_threads_, false);
    for (size_t i = 0; i < backends_.size(); ++i) backends_[i]->reserve_workspace(measured.workspaces[i]);
    decoder_ = std::make_unique<Decoder>(file_, options.cache, shares_of(devices_, backends_), extra);
    for (size_t i = 0; i < backends_.size(); ++i)
        scratches_.emplace_back(*backends_[i], measured.activations[i]);
}

EngineInfo Engine::info() { return describe(*decoder_, devices_, n_threads_); }

Backend& Engine::host() {
    return **std::ranges::max_element(backends_, {}, [](const auto& one) { return one->host_threads(); });
}

SparseCounts Engine::sparse_counts() const {
    SparseCounts all;
    for (const auto& backend : backends_) {
        const auto [rows, skipped] = backend->sparse_counts();
        all.rows += rows, all.skipped += skipped;
    }
    return all;
}

void Engine::require_valid(std::span<const Item> items) {
    file_.require_unchanged();
    if (config().n_layers == 0)
        fail(ErrorCode::unsupported, "architecture '", config().architecture->name,
             "' has no decoder: it encodes, and appends no tokens");
    std::set<int> seen;
    std::vector<std::pair<int, int64_t>> growth;
    for (const Item& item : items) {
        if (item.tokens.empty()) fail(ErrorCode::argument, "nothing to append: an item has no tokens");
        if (!seen.insert(item.sequence).second)
            fail(ErrorCode::argument, "sequence ", item.sequence, " is listed twice in one append");
        if (decoder_->encoder() && !encoder_states_of_.count(item.sequence))
            fail(ErrorCode::argument, "sequence ", item.sequence, " has no source: encode one first");
        for (const int32_t token : item.tokens)
            if (token < 0 || token >= config().n_vocab)
                fail(ErrorCode::argument, "token ", token, " is outside the vocabulary of ",
                     config().n_vocab);
        growth.emplace_back(item.sequence, item.tokens.size());
    }
    cache().require_room(growth);
}

bool Engine::has_room(KvCache::Growth growth) {
    std::set<int> seen;
    for (const auto& [id, n] : growth) {
        if (n < 0) fail(ErrorCode::argument, "a sequence cannot grow by ", n, " tokens");
        if (!seen.insert(id).second) fail(ErrorCode::argument, "sequence ", id, " is listed twice");
    }
    return cache().has_room(growth);
}

Step Engine::next_step(std::span<const Item> items, Cursor& at) {
    const CacheOptions& o = decoder_->options();
    const StepLimits limits = decoder_->step_limits();
    Step step(cache());
    while (at.item < items.size() && step.n_sequences() < o.n_seqs) {
        const auto [id, tokens, outputs] = items[at.item];
        const int64_t n =
            share_of_step(limits, o.n_batch, int64_t(step.tokens.size()), int64_t(tokens.size() - at.token));
        if (n == 0) break;
        step.add_sequence(cache(), id, n);
        if (KvCache* states = decoder_->encoder_states()) {
            const int of = encoder_states_of_.at(id);
            step.add_encoder_states(states->length(of), states->table(of, 0));
        }
        for (int64_t i = 0; i < n; ++i, ++at.token) {
            if (at.token + size_t(outputs) >= tokens.size())
                step.outputs.push_back(int32_t(step.tokens.size()));
            step.tokens.push_back(tokens[at.token]);
        }
        if (at.token == tokens.size()) at = {at.item + 1, 0};
        if (n >= o.n_batch || n > limits.stored) break;  // a step of its own
    }
    return step;
}

std::string Engine::undo(const Lengths& before) {
    std::string kept;
    for (const auto& [id, length] : before) {
        const int64_t now = cache().length(id);
        const bool can = cache().can_truncate(id, length);
        cache().truncate(id, can ? length : now);
        if (!can)
            kept += concat(
                ". Sequence ", id, " had ", length, " tokens and now has ", now,
                ", since rows that it had are given back or forgotten: truncate it to 0 to begin again");
    }
    return kept;
}

void Engine::append(std::span<const Item> items, Output output, float* out, const Progress& progress,
                    const StepObserver& observer) {
    require_valid(items);
    Lengths before;
    for (const Item& item : items) before.emplace_back(item.sequence, cache().length(item.sequence));
    try {
        run_steps(items, output, out, progress, observer);
    } catch (const Error& error) {
        throw Error(error.code, error.what() + undo(before), error.needed, error.available);
    } catch (...) {
        undo(before);
        throw;
    }
}

void Engine::run_steps(std::span<const Item> items, Output output, float* out, const Progress& progress,
                       StepObserver observer) {
    const OnFastCores place(n_threads_);
    int64_t total = 0, done = 0;
    for (const Item& item : items) total += int64_t(item.tokens.size());
    using Clock = std::chrono::steady_clock;
    Clock::time_point reported = Clock::now();
    auto report = [&](int64_t so_far) {
        reported = Clock::now();
        if (progress) progress(so_far, total);
    };
    int64_t in_step = 0;
    observer.progress = [&](double share) {
        if (Clock::now() - reported > std::chrono::milliseconds(200)) report(done + int64_t(share * in_step));
    };
    for (Cursor at; at.item < items.size();) {
        size_t item = at.item;
        const Step step = next_step(items, at);
        in_step = int64_t(step.tokens.size());
        run_step(*decoder_, scratches_, step, output, out, observer);
        for (const AttentionSequence& s : step.groups[0].sequences)
            cache().commit(items[item++].sequence, s.n_queries);
        if (out) out += step.outputs.size() * width_of(output);
        done += in_step;
        report(done);
    }
    for (const Item& each : items) cache().age_rows(each.sequence);
}

std::vector<Choice> Engine::sample(std::span<const RowToSample> rows) {
    const OnFastCores place(n_threads_);
    Backend& backend = host();
    sampler_scratch_.resize(size_t(backend.host_threads()));
    return sample_rows(rows, sampler_scratch_,
                       [&](int64_t n, const auto& fn) { backend.run_on_host(n, fn); });
}

void Engine::each_row(int64_t n, const std::function<void(int64_t row)>& fn) {
    const OnFastCores place(n_threads_);
    host().run_on_host(n, [&](int64_t row, int) { fn(row); });
}

void Engine::attention_inputs(std::span<const int32_t> tokens, float* out, const Progress& progress) {
    const int64_t n = int64_t(tokens.size()), d = config().d_model;
    const int sequence = cache().create();
    std::vector<int64_t> filled(config().n_layers, 0);
    StepObserver observer;
    observer.attention_input = [&](int layer, Tensor x) {
        decoder_->part_of(layer).backend->download(out + (layer * n + filled[layer]) * d, x, x.bytes());
        filled[layer] += x.rows;
    };
    const ScopeExit finish([&] { cache().release(sequence); });
    const Item item{sequence, tokens};
    append({&item, 1}, Output::logits, nullptr, progress, observer);
}

std::map<std::string, InputSquares> Engine::input_squares(std::span<const int32_t> tokens,
                                                          const Progress& progress) {
    InputSquaresOfWeights squares(file_, decoder_->matrices());
    const int sequence = cache().create();
    const ScopeExit finish([&] {
        cache().release(sequence);
        for (const auto& backend : backends_) backend->observe_products({});
    });
    for (const auto& backend : backends_)
        if (!backend->observe_products([&](Tensor weight, Tensor x) { squares.add(weight, x); }))
            fail(ErrorCode::unsupported, "inputs of products are summed on the CPU alone, not on ",
                 backend->description());
    const Item item{sequence, tokens};
    append({&item, 1}, Output::logits, nullptr, progress);
    return squares.sums();
}

std::string Engine::cache_fingerprint() {
    std::string text = concat("slimrt rows 3 ", config().architecture->name, " ", config().n_layers);
    for (int layer = 0; layer < config().n_layers; ++layer) {
        for (int c = 0; c < cache().n_classes(layer); ++c) {
            if (c > 0) text += " older";
            for (const Plane& plane : cache().format(layer, c))
                text += concat(" ", plane.name, ":", plane.heads, "x", plane.width / plane.heads, ":",
                               dtype_info(plane.type).name);
        }
        if (const Regions& r = cache().regions(layer); r.n_classes > 1) {
            text += concat(" sinks:", r.sinks, " recent:", r.recent);
            for (const auto& [part, blocks] : r.shares)
                text += blocks > 0 ? concat(" rows:", blocks * kBlockTokens) : concat(" share:", part);
        }
        if (const int64_t window = cache().window(layer)) text += concat(" window:", window);
        if (const uint64_t fold = decoder_->fold_of_rows(layer)) text += concat(" fold:", fold);
    }
    return text + kRope + std::to_string(hash_of_rotation(config(), file_, decoder_->options().n_ctx));
}

// Layout: SavedHead, fingerprint, rows.
std::vector<std::byte> Engine::save_rows(int sequence, int64_t begin) {
    if (decoder_->encoder())
        fail(ErrorCode::unsupported,
             "sequences with a source cannot be saved: encode the source again instead");
    const std::string fingerprint = cache_fingerprint();
    const std::vector<std::byte> rows = cache().save(sequence, begin);
    const SavedHead head{uint32_t(fingerprint.size()), uint32_t(begin), uint64_t(cache().length(sequence))};
    std::vector<std::byte> out(sizeof head + fingerprint.size());
    std::memcpy(out.data(), &head, sizeof head);
    std::memcpy(out.data() + sizeof head, fingerprint.data(), fingerprint.size());
    out.insert(out.end(), rows.begin(), rows.end());
    return out;
}

int Engine::load_sequence(std::span<const std::byte> bytes) {
    const int sequence = create();
    try {
        load_rows(sequence, bytes);
    } catch (...) {
        release(sequence);
        throw;
    }
    return sequence;
}

void Engine::load_rows(int sequence, std::span<const std::byte> bytes) {
    SavedHead head;
    const std::string expected = cache_fingerprint();
    if (bytes.size() < sizeof head) fail(ErrorCode::format, "the saved sequence is truncated");
    std::memcpy(&head, bytes.data(), sizeof head);
    bytes = bytes.subspan(sizeof head);
    if (head.fingerprint > bytes.size())
        fail(ErrorCode::format, "the saved sequence is truncated or not one of slimrt's");
    const std::string found(reinterpret_cast<const char*>(bytes.data()), head.fingerprint);
    if (found != expected && found.substr(0, found.rfind(kRope)) == expected.substr(0, expected.rfind(kRope)))
        fail(
            ErrorCode::format,
            "the saved sequence was computed under other rotary frequencies, which this model chooses by its "
            "n_ctx (now ",
            cache().n_ctx(), "): load the model with the n_ctx of then, or compute the tokens again");
    if (found != expected)
        fail(ErrorCode::format, "the saved sequence is of another model or cache: it has '", found,
             "', this is '", expected, "'");
    if (head.length > uint64_t(cache().n_ctx()))
        fail(ErrorCode::context_overflow, "the saved sequence has ", head.length, " tokens, n_ctx is ",
             cache().n_ctx());
    cache().restore(sequence, bytes.subspan(head.fingerprint), head.begin, int64_t(head.length));
}

}  // namespace slimrt
