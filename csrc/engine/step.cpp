#include "engine/step.h"

#include <algorithm>

namespace slimrt {

void Step::add_sequence(int64_t n, int64_t cached, const int32_t* table) {
    const int first = int(positions.size());
    for (int64_t i = 0; i < n; ++i) positions.push_back(int32_t(cached + i));
    sequences.push_back(
        {.query = first, .n_queries = int(n), .position = cached, .end = cached, .table = table});
}

namespace {

Tensor upload(Backend& backend, Scratch& scratch, const std::vector<int32_t>& values) {
    const Tensor t = scratch.i32(int64_t(values.size()));
    backend.upload(t, values.data(), values.size() * sizeof(int32_t));
    return t;
}

}  // namespace

void run_step(const Decoder& decoder, Backend& backend, Scratch& scratch, const Step& step, float* out) {
    constexpr int64_t kLogitRows = 32;  // the head's output is wide: a few rows at a time
    const Scratch::Scope scope(scratch);
    const Batch batch{upload(backend, scratch, step.tokens), upload(backend, scratch, step.positions),
                      upload(backend, scratch, step.slots), step.sequences,
                      upload(backend, scratch, step.outputs)};
    const int64_t n = int64_t(step.outputs.size()), n_vocab = decoder.config().n_vocab;
    const Tensor hidden = scratch.f32(n, decoder.config().d_model);
    decoder.forward(batch, scratch, hidden);
    const Tensor rows = scratch.f32(std::min(n, kLogitRows), n_vocab);
    for (int64_t first = 0; first < n; first += kLogitRows) {
        const Tensor some = rows.rows_of(0, std::min(kLogitRows, n - first));
        decoder.logits(hidden.rows_of(first, some.rows), some);
        backend.download(out + first * n_vocab, some, some.bytes());
    }
}

size_t measure_scratch(Decoder& decoder, Backend& dry) {
    const CacheOptions& o = decoder.options();
    const int64_t n_ctx = o.n_ctx, batch = std::min<int64_t>(o.n_batch, n_ctx);
    const int64_t seqs = std::min<int64_t>(o.n_seqs, o.n_batch);
    const int64_t few = std::min<int64_t>(decoder.config().head_dim, batch);  // the longest absorbed part
    // Token counts of the sequences in each kind of step; every sequence's context is full.
    std::vector<std::vector<int64_t>> steps = {{batch}, {few}, std::vector<int64_t>(seqs, 1)};
    if (seqs > 1) {
        steps.push_back(std::vector<int64_t>(seqs, std::min(n_ctx, std::max<int64_t>(1, o.n_batch / seqs))));
        for (const int64_t share : {few, int64_t(1)}) {
            std::vector<int64_t> mixed(seqs, 0);
            int64_t left = o.n_batch;
            for (size_t i = 1; i < mixed.size() && left > share; ++i, left -= share) mixed[i] = share;
            mixed[0] = std::min(left, n_ctx);
            std::erase(mixed, 0);
            steps.push_back(mixed);
        }
    }
    Scratch scratch;
    for (const std::vector<int64_t>& counts : steps) {
        Step step;
        for (const int64_t n : counts) step.add_sequence(n, n_ctx - n, nullptr);
        step.tokens = step.slots = step.outputs = step.positions;
        run_step(decoder, dry, scratch, step, nullptr);
    }
    return scratch.peak();
}

}  // namespace slimrt
