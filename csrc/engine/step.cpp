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
    const int64_t tokens = std::min<int64_t>(o.n_batch, o.n_ctx * o.n_seqs);
    const int64_t longest = std::min<int64_t>(o.n_batch, o.n_ctx);  // of one sequence
    const int64_t absorbed = std::min<int64_t>(decoder.config().head_dim, tokens);
    struct Extreme {
        int64_t n, cached;
    };
    // Attention takes a step part by part (cache/modes), and what a part needs grows with its tokens and with
    // the rows it reads. So each of these has all tokens a step can have, but as its only part the largest of
    // one kind: materialised, the same with nothing stored (then also short ones), absorbed. No legal step
    // needs more, though not every one of these is legal itself.
    const Extreme extremes[] = {{longest, o.n_ctx - 1}, {longest, 0}, {absorbed, o.n_ctx - 1}};
    Scratch scratch;
    Step step;
    step.tokens.resize(tokens);
    step.positions = step.slots = step.outputs = step.tokens;
    for (const auto& [n, cached] : extremes) {
        step.sequences = {{.n_queries = int(n), .position = cached, .end = cached}};
        run_step(decoder, dry, scratch, step, nullptr);
    }
    return scratch.peak();
}

}  // namespace slimrt
