#include "engine/step.h"

#include <algorithm>
#include <bit>
#include <numeric>

#include "core/error.h"

namespace slimrt {

void Step::add_sequence(KvCache& cache, int sequence, int64_t n) {
    const int first = int(positions.size());
    const int64_t cached = cache.length(sequence);
    cache.reserve(sequence, n);
    for (int64_t i = 0; i < n; ++i) positions.push_back(int32_t(cached + cache.skipped(sequence) + i));
    for (int g = 0; g < cache.n_groups(); ++g) {
        auto& [slots, newest, older] = groups[g];
        cache.add_slots(sequence, g, n, slots);
        const std::vector<Region> regions = cache.regions_of(sequence, g);
        older.resize(regions.size() - 1);
        for (size_t i = 0; i < regions.size(); ++i) {
            const auto& [c, origin, begin, end] = regions[i];
            const bool is_newest = i + 1 == regions.size();
            if (!is_newest) older[i].c = c, older[i].origin = origin;
            (is_newest ? newest : older[i].sequences)
                .push_back({.query = first,
                            .n_queries = int(n),
                            .position = cached - origin,
                            .begin = begin - origin,
                            .end = end - origin,
                            .fresh = is_newest,
                            .table = cache.table(sequence, g, c),
                            .causal = is_newest});
            if (is_newest) newest.back().means = cache.means(sequence, g);
        }
    }
    last = sequence;
}

void Step::add_encoder_states(int64_t length, const int32_t* table) {
    AttentionSequence s = groups[0].sequences.back();
    s.begin = 0;
    s.end = length;
    s.fresh = s.causal = false;
    s.table = table;
    encoder_states.push_back(s);
}

void Encoding::add(const EncoderInput& input, int64_t length) {
    inputs.push_back(input);
    lengths.push_back(length);
    const auto& given = input.positions;
    positions.insert(positions.end(), given.begin(), given.end());
    if (!given.empty()) return;
    positions.resize(positions.size() + length);
    std::iota(positions.end() - length, positions.end(), 0);
}

namespace {

Tensor upload(Backend& backend, Scratch& scratch, const std::vector<int32_t>& values) {
    const Tensor t = scratch.i32(int64_t(values.size()));
    backend.upload(t, values.data(), values.size() * sizeof(int32_t));
    return t;
}

/// Whether each sequence has one token and rows before it: such steps make the same backend calls whatever
/// the tokens and lengths are, so that these can be captured. A first token is computed as a prompt.
bool is_repeated(const Step& step) {
    return std::ranges::all_of(step.groups, [](const Step::Group& group) {
        return std::ranges::all_of(
            group.sequences, [](const AttentionSequence& s) { return s.n_queries == 1 && s.end > s.begin; });
    });
}

/// Whether rows of some layers have no slots, since KvCache::place() will store them.
bool is_placed(const Step& step) {
    return std::ranges::any_of(step.groups, [](const Step::Group& group) { return group.slots.empty(); });
}

/// The step as a batch in the backend's memory, and its outputs. All integers are uploaded together;
/// `numbers` must live as long as the batch. On a dry backend they stay in the step: a plan has millions.
Batch batch_of(Backend& backend, const Step& step, std::vector<int32_t>& numbers, Tensor& outputs) {
    Batch batch{.encoder_states = step.encoder_states,
                .sequence = step.n_sequences() == 1 ? step.last : -1,
                .chunk = is_placed(step)};
    for (const Step::Group& group : step.groups) batch.groups.push_back({{}, group.sequences, group.older});
    std::vector<std::span<AttentionSequence>> lists;
    const auto add = [&](const std::vector<int32_t>& list) {
        if (backend.dry()) return;
        const size_t at = numbers.size();
        numbers.resize(at + list.size());
        std::copy(list.begin(), list.end(), numbers.begin() + at);
    };
    add(step.tokens);
    add(step.positions);
    add(step.outputs);
    for (size_t g = 0; g < batch.groups.size(); ++g) {
        add(step.groups[g].slots);
        lists.push_back(batch.groups[g].sequences);
        for (OlderRows& rows : batch.groups[g].older) lists.push_back(rows.sequences);
    }
    lists.push_back(batch.encoder_states);
    int32_t* const base = backend.upload_step(numbers, lists).i32();
    size_t at = 0;
    const auto take = [&](const std::vector<int32_t>& list, Tensor& to) {
        int32_t* const data = backend.dry() ? const_cast<int32_t*>(list.data()) : base + at;
        if (!list.empty()) to = Tensor(data, DType::I32, 1, int64_t(list.size()));
        at += list.size();
    };
    take(step.tokens, batch.tokens);
    take(step.positions, batch.positions);
    take(step.outputs, outputs);
    for (size_t g = 0; g < batch.groups.size(); ++g) take(step.groups[g].slots, batch.groups[g].slots);
    return batch;
}

/// x between two parts, in host memory.
using Hidden = std::vector<float>;

/// x after the layers of a part, in its scratch; before: x of the part before it, empty for the first.
Tensor run_part(const Decoder& decoder, const Part& part, Scratch& scratch, const Step& step,
                const Batch& batch, const Hidden& before, const StepObserver& observer) {
    const Tensor x = scratch.f32(batch.tokens.cols, decoder.config().d_model);
    if (!before.empty()) part.backend->upload(x, before.data(), x.bytes());
    const auto forward = [&] { decoder.forward(part, batch, scratch, x, observer); };
    if (!observer.wants_inputs() && is_repeated(step))
        part.backend->capture_and_replay(concat(batch.tokens.cols, " ", step.outputs.size()), forward);
    else
        forward();
    return x;
}

/// The rows of x that have outputs, through the head to the host.
void run_head(const Decoder& decoder, Scratch& scratch, Tensor x, Tensor outputs, Output output, float* out) {
    constexpr int64_t kLogitRows = 32;  // logits are wide: a few rows at a time
    Backend& backend = *decoder.parts().back().backend;
    const int64_t n = outputs.cols;
    const Tensor states = scratch.f32(std::min(n, kLogitRows), x.cols);
    const Tensor logits = scratch.f32(states.rows, decoder.config().n_vocab);
    const Tensor candidates =  // whatever the output is: a plan is for all
        backend.on_host() ? Tensor() : scratch.f32(states.rows, 2 * n_candidates(decoder.config()));
    const Tensor result = output == Output::logits       ? logits
                          : output == Output::states     ? states
                          : output == Output::candidates ? candidates
                                                         : Tensor(states.data, DType::I32, states.rows, 1);
    const bool in_place = output == Output::logits && out && backend.on_host();  // without a copy
    for (int64_t first = 0; first < n; first = next_chunk(first, n, kLogitRows, backend.dry())) {
        const int64_t some = std::min(kLogitRows, n - first);
        backend.gather(x, outputs.cols_of(first, some), states.rows_of(0, some));
        decoder.final_norm(states.rows_of(0, some));
        const Tensor to = in_place ? Tensor(out + first * logits.cols, DType::F32, some, logits.cols)
                                   : logits.rows_of(0, some);
        if (output != Output::states) decoder.logits(states.rows_of(0, some), to);
        if (output == Output::tokens) backend.likeliest(to, result.rows_of(0, some));
        if (output == Output::candidates) backend.largest(to, result.rows_of(0, some));
        if (!out || in_place) continue;
        backend.download(out + first * result.cols, result, result.rows_of(0, some).bytes());
        for (int64_t i = first; output == Output::tokens && i < first + some; ++i)
            if (std::bit_cast<int32_t>(out[i]) < 0)
                fail(ErrorCode::format, "the logits are NaN or infinite, or sample() has to choose here");
    }
}

}  // namespace

void run_step(const Decoder& decoder, std::span<Scratch> scratches, const Step& step, Output output,
              float* out, const StepObserver& observer) {
    Hidden hidden;
    for (size_t i = 0; i < decoder.parts().size(); ++i) {
        const Part& part = decoder.parts()[i];
        const Scratch::Scope scope(scratches[i]);
        std::vector<int32_t> numbers;
        Tensor outputs;
        const Batch batch = batch_of(*part.backend, step, numbers, outputs);
        const Tensor x = run_part(decoder, part, scratches[i], step, batch, hidden, observer);
        if (i + 1 < decoder.parts().size()) {
            if (!part.backend->dry()) hidden.resize(x.rows * x.cols);
            part.backend->download(hidden.data(), x, hidden.size() * sizeof(float));
        } else if (outputs) {
            run_head(decoder, scratches[i], x, outputs, output, out);
        }
    }
}

void run_encoding(const Decoder& decoder, Scratch& scratch, const Encoding& encoding, float* states,
                  const Encoder::Progress& progress) {
    const Scratch::Scope scope(scratch);
    Backend& backend = *decoder.parts().front().backend;
    const Encoder& encoder = *decoder.encoder();
    const ModelConfig& c = decoder.config();
    const Tensor slots = encoding.slots.empty() ? Tensor{} : upload(backend, scratch, encoding.slots);
    const Tensor x = scratch.f32(int64_t(encoding.positions.size()), c.d_model);
    int64_t first = 0;
    for (size_t i = 0; i < encoding.inputs.size(); ++i) {
        const Scratch::Scope of_input(scratch);
        const auto& [ids, values, n, encoded, positions] = encoding.inputs[i];
        const Tensor to = x.rows_of(first, encoding.lengths[i]);
        first += to.rows;
        if (c.n_inputs > 0 && !encoded) {
            const Tensor from = scratch.f32(n, c.n_inputs);
            backend.upload(from, values, from.bytes());
            encoder.convolve(from, scratch, to);
        } else if (values) {
            backend.upload(to, values, to.bytes());
        } else {
            const Tensor tokens = scratch.i32(n);
            backend.upload(tokens, ids.data(), tokens.bytes());
            encoder.embed(tokens, to);
        }
    }
    if (!encoding.inputs[0].encoded)
        encoder.forward(encoding.lengths, encoding.positions, scratch, x, progress);
    decoder.store_encoder_states(x, slots, scratch);
    if (states) backend.download(states, x, x.bytes());
}

}  // namespace slimrt
