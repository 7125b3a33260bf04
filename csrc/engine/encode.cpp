// Engine with an encoder: inputs, and the encoder states that sequences read.
#include <algorithm>
#include <cmath>
#include <set>

#include "core/error.h"
#include "core/processors.h"
#include "engine/engine.h"
#include "model/architecture.h"

namespace slimrt {
namespace {

void softmax(float* scores, int64_t n) {
    const float most = *std::max_element(scores, scores + n);
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += scores[i] = std::exp(scores[i] - most);
    for (int64_t i = 0; i < n; ++i) scores[i] = float(scores[i] / sum);
}

/// The end of a message on a source that is longer than n_source: a table of positions has an end.
const char* remedy(const ModelConfig& c, int64_t n_source) {
    const bool grows = !c.architecture->encoder_positions || n_source < c.n_source_train;
    return grows ? ": cut the source, or raise n_source" : ": cut the source";
}

}  // namespace

int Engine::create() { return cache().create(); }

int Engine::fork(int sequence) {
    const int id = cache().fork(sequence);
    if (const auto it = encoder_states_of_.find(sequence); it != encoder_states_of_.end())
        encoder_states_of_[id] = decoder_->encoder_states()->fork(it->second);
    return id;
}

int Engine::thin(int sequence, int64_t first_blocks, int64_t last_blocks) {
    for (const auto& layer : decoder_->layers())
        if (std::string_view(layer.mode->name()) != "kv" || !layer.rotates_keys || decoder_->encoder())
            fail(ErrorCode::unsupported,
                 "a thin fork needs rows of cache mode kv in all layers, of a model "
                 "without an encoder: others' rows do not know their positions");
    return cache().thin(sequence, first_blocks, last_blocks);
}

void Engine::release(int sequence) {
    cache().release(sequence);
    forget_encoder_states(sequence);
}

int64_t Engine::encoder_rows(const EncoderInput& input) const {
    const Encoder* encoder = decoder_->encoder();
    if (!encoder)
        fail(ErrorCode::argument, "architecture '", decoder_->config().architecture->name,
             "' has no encoder: there is nothing to encode");
    const int64_t n = input.encoded ? input.rows : encoder->rows_of(input.rows),
                  most = decoder_->options().n_source;
    if (n < 1) fail(ErrorCode::argument, "a source of ", input.rows, " rows is too short for the encoder");
    if (n > most)
        fail(ErrorCode::context_overflow, "a source of ", input.rows, " rows gives ", n,
             " rows of the encoder's output, more than the ", most, " there is room for",
             remedy(config(), most));
    return n;
}

void Engine::require_positions(const EncoderInput& input) const {
    const auto& positions = input.positions;
    if (positions.empty()) return;
    if (input.encoded || config().n_inputs > 0)
        fail(ErrorCode::argument,
             "positions are for rows of tokens or embeddings that are yet to be encoded");
    if (int64_t(positions.size()) != input.rows)
        fail(ErrorCode::argument, "a source of ", input.rows, " rows has ", positions.size(),
             " positions: give one for each row");
    const bool series = config().architecture->encoder == EncoderKind::series;
    for (size_t i = 0; i < positions.size(); ++i)
        if (positions[i] < 0 || (i > 0 && positions[i] <= positions[i - 1] && !series))
            fail(ErrorCode::argument, "positions must ascend from 0 or more, but row ", i, " is at ",
                 positions[i]);
    const int64_t last = *std::ranges::max_element(positions);
    if (const int64_t most = decoder_->options().n_source; last >= most)
        fail(ErrorCode::context_overflow, "a source has a row at position ", last,
             ", the last that there is room for is ", most - 1, remedy(config(), most));
}

void Engine::require_not_encoded(const EncodeItem& item) {
    if (cache().length(item.sequence) > 0 || encoder_states_of_.count(item.sequence))
        fail(ErrorCode::argument, "sequence ", item.sequence, " has a source or tokens already");
    for (const int32_t id : item.input.ids)
        if (id < 0 || id >= config().n_vocab)
            fail(ErrorCode::argument, "token ", id, " is outside the vocabulary of ", config().n_vocab);
}

void Engine::encode(std::span<const EncodeItem> items, float* states, const Progress& progress) {
    file_.require_unchanged();
    std::set<int> seen;
    for (const EncodeItem& item : items) {
        encoder_rows(item.input);
        require_positions(item.input);
        require_not_encoded(item);
        if (!seen.insert(item.sequence).second)
            fail(ErrorCode::argument, "sequence ", item.sequence, " is listed twice");
    }
    const int64_t most = decoder_->options().n_source, total = int64_t(items.size());
    size_t first = 0, end = 0;
    const Encoder::Progress within = [&](double share) {
        if (progress) progress(int64_t(first) + int64_t(share * double(end - first)), total);
    };
    for (; first < items.size(); first = end) {
        int64_t rows = 0;
        for (end = first; end < items.size(); ++end) {
            const int64_t n = encoder_rows(items[end].input);
            if (rows + n > most || items[end].input.encoded != items[first].input.encoded) break;
            rows += n;
        }
        try {
            encode_some(items.subspan(first, end - first), states, within);
            if (progress) progress(int64_t(end), total);
        } catch (...) {
            for (const EncodeItem& item : items) forget_encoder_states(item.sequence);
            throw;
        }
        if (states) states += rows * config().d_model;
    }
}

void Engine::forget_encoder_states(int sequence) {
    const auto it = encoder_states_of_.find(sequence);
    if (it == encoder_states_of_.end()) return;
    decoder_->encoder_states()->release(it->second);
    encoder_states_of_.erase(it);
}

void Engine::encode_some(std::span<const EncodeItem> items, float* states,
                         const Encoder::Progress& progress) {
    const OnFastCores place(n_threads_);
    KvCache* const rows = decoder_->encoder_states();
    Encoding encoding;
    for (const EncodeItem& item : items) {
        const int64_t n = encoder_rows(item.input);
        encoding.add(item.input, n);
        if (!rows) continue;
        const int id = rows->create();
        encoder_states_of_[item.sequence] = id;
        const std::pair<int, int64_t> growth{id, n};
        rows->require_room({&growth, 1});
        rows->reserve(id, n);
        rows->add_slots(id, 0, n, encoding.slots);
    }
    run_encoding(*decoder_, scratches_[0], encoding, states, progress);
    for (size_t i = 0; i < items.size() && rows; ++i)
        rows->commit(encoder_states_of_[items[i].sequence], encoding.lengths[i]);
}

int64_t Engine::encoder_length(int sequence) const {
    const auto it = encoder_states_of_.find(sequence);
    if (it == encoder_states_of_.end())
        fail(ErrorCode::argument, "sequence ", sequence, " has no source: encode one first");
    return decoder_->encoder_states()->length(it->second);
}

std::vector<float> Engine::alignment(const Item& item, std::span<const Head> heads,
                                     const Progress& progress) {
    const int64_t rows = encoder_length(item.sequence), n = int64_t(item.tokens.size());
    for (const auto& [layer, head] : heads)
        if (layer < 0 || layer >= config().n_layers || head < 0 || head >= config().n_heads)
            fail(ErrorCode::argument, "layer ", layer, " has no head ", head);
    const int64_t width = config().d_model + 2 * config().n_heads * config().head_dim;
    Scratch scratch(*backends_[0], size_t((rows + 1) * (width + n + 64) + n * width) * sizeof(float));
    const AttentionSequence states{
        .end = rows, .table = decoder_->encoder_states()->table(encoder_states_of_.at(item.sequence), 0)};
    std::vector<float> out(heads.size() * n * rows);
    std::vector<int64_t> filled(heads.size(), 0);
    StepObserver observer;
    observer.cross_input = [&](int layer, Tensor x) {
        for (size_t i = 0; i < heads.size(); ++i) {
            if (heads[i].layer != layer) continue;
            const Scratch::Scope scope(scratch);
            const Tensor scores = scratch.f32(x.rows, rows);
            decoder_->cross_scores(layer, heads[i].head, x, states, scratch, scores);
            float* const to = out.data() + (i * n + filled[i]) * rows;
            backends_[0]->download(to, scores, scores.bytes());
            for (int64_t t = 0; t < x.rows; ++t) softmax(to + t * rows, rows);
            filled[i] += x.rows;
        }
    };
    const int64_t before = cache().length(item.sequence);
    append({&item, 1}, Output::logits, nullptr, progress, observer);
    cache().truncate(item.sequence, before);
    return out;
}

}  // namespace slimrt
