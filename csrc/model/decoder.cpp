#include "model/decoder.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "cache/attend.h"
#include "core/error.h"
#include "model/architecture.h"
#include "model/layer_embedding.h"

namespace slimrt {

namespace {

const Rope kNoRope;

std::vector<LayerSpan> spans_of(const std::vector<LayerChoice>& layers) {
    std::vector<LayerSpan> spans;
    for (const LayerChoice& layer : layers) {
        spans.push_back({layer.config.layer, layer.config.layer + 1});
        while (spans.back().begin > layer.owner) spans.pop_back(), spans.back().end = layer.config.layer + 1;
    }
    return spans;
}

/// What each layer keeps: nothing where it reads another's rows.
std::vector<LayerRows> rows_of(const std::vector<LayerChoice>& layers) {
    std::vector<LayerRows> rows;
    for (const LayerChoice& layer : layers) {
        const auto& [mode, config, owner, shared, rotates] = layer;
        rows.push_back({{}, config.window, mode->regions(config)});
        if (!layer.owns()) continue;
        rows.back().formats = mode->older_formats(config);
        rows.back().formats.insert(rows.back().formats.begin(), mode->format(config));
    }
    return rows;
}

/// The n_batch tokens from `first` on. What comes before them in a sequence is stored by then.
Batch chunk_of(const Batch& batch, int64_t first, int64_t n_batch) {
    const int64_t n = std::min(n_batch, batch.tokens.cols - first);
    if (n == batch.tokens.cols) return batch;
    Batch chunk{.tokens = batch.tokens.cols_of(first, n),
                .positions = batch.positions.cols_of(first, n),
                .groups = batch.groups,
                .encoder_states = batch.encoder_states,
                .sequence = batch.sequence,
                .chunk = true};
    for (GroupBatch& group : chunk.groups) {
        assert(group.sequences.size() == 1);
        AttentionSequence& s = group.sequences[0];
        if (group.slots) group.slots = group.slots.cols_of(first, n);
        s.n_queries = int(n);
        s.position += first;
        s.end += first;
        s.uploaded = -1;
        for (OlderRows& older : group.older) {
            older.sequences[0].n_queries = int(n);
            older.sequences[0].position += first;
            older.sequences[0].uploaded = -1;
        }
    }
    for (AttentionSequence& s : chunk.encoder_states) {
        s.n_queries = int(n);
        s.uploaded = -1;
    }
    return chunk;
}

}  // namespace

// x = embed(tokens); layers; logits = norm(x) W_out. Layers that share rows go together, chunk by chunk.
void Decoder::forward(const Batch& batch, Scratch& scratch, Tensor x, const StepObserver& observer) const {
    const int64_t n = x.rows, n_batch = options_.n_batch;
    Scratch lasting = scratch.other_end();
    for (const LayerSpan& span : spans_) {
        const Scratch::Scope scope(scratch);
        StepState state{observer, {}};
        take_dense_rows(span, scratch, state);
        for (int64_t first = 0; first < n; first += n_batch) {
            const Batch chunk = chunk_of(batch, first, n_batch);
            const Tensor rows = x.rows_of(first, chunk.tokens.cols);
            const Scratch::Scope of_chunk(lasting);
            for (int layer = span.begin; layer < span.end; ++layer) {
                const double done = layer + (span.end - span.begin) * double(first) / n;
                if (observer.progress) observer.progress(done / config_.n_layers);
                if (layer == 0) embed(chunk, scratch, rows);
                add_layer(layer, chunk, state, scratch, rows);
            }
        }
        for (const auto& [owner, rows] : state.owners)
            if (!batch.groups[cache_->group_of(owner)].slots)
                cache_->place(batch.sequence, owner, rows.dense);
    }
}

void Decoder::take_dense_rows(const LayerSpan& span, Scratch& scratch, StepState& state) const {
    for (int layer = span.begin; layer < span.end; ++layer) {
        const LayerChoice& choice = choices_.layers[layer];
        if (!choice.owns()) continue;
        for (const Plane& plane : choice.mode->dense_format(choice.config))
            state.owners[layer].dense.planes.push_back(scratch.take(plane.type, options_.n_ctx, plane.width));
    }
}

StepLimits Decoder::step_limits() const {
    constexpr int64_t kMin = 1 << 10, kMax = 1 << 14;
    int64_t longest = 0, stored = options_.n_batch;
    for (const auto& [mode, config, owner, shared, rotates] : choices_.layers)
        if (mode->regions(config).n_classes > 1)
            longest = options_.n_ctx, stored = std::min<int64_t>(stored, kBlockTokens);
        else if (!mode->dense_format(config).empty())
            longest = std::max(longest, std::min(options_.n_ctx, std::clamp(options_.n_ctx / 4, kMin, kMax)));
    return {std::max<int64_t>(options_.n_batch, longest), stored};
}

uint64_t Decoder::fold_of_rows(int layer) const {
    return weights_.layers[layer].attn_prepared->fingerprint(backend_);
}

void Decoder::embed(const Batch& batch, Scratch& scratch, Tensor x) const {
    backend_.gather(weights_.token_embd, batch.tokens, x);
    if (config_.embedding_scale != 1) backend_.scale(x, config_.embedding_scale);
    norm(backend_, config_, weights_.token_embd_norm, x, x);
    if (!weights_.position_embd) return;
    const Scratch::Scope scope(scratch);
    const Tensor p = scratch.f32(x.rows, x.cols);
    backend_.gather(weights_.position_embd, batch.positions, p);
    backend_.add(x, p);
}

// x += attention(x), x += cross_attention(x) over encoder states, x += ffn(x); in parallel: x += attention(x)
// + ffn(x). What attention and FFN add may be scaled. Then x += what the layer makes of embeddings of its
// own, and x may be scaled.
void Decoder::add_layer(int layer, const Batch& batch, StepState& state, Scratch& scratch, Tensor x) const {
    const Scratch::Scope scope(scratch);
    const Tensor out = scratch.f32(x.rows, x.cols);
    attention(layer, batch, state, scratch, x, out);
    const LayerWeights& w = weights_.layers[layer];
    if (config_.parallel_residual) {
        const Tensor other = scratch.f32(x.rows, x.cols);
        feed_forward(backend_, config_, w, scratch, x, other);
        add_scaled(x, other);
    } else {
        add_scaled(x, out);
        if (!choices_.cross.empty()) {
            cross_attention(layer, batch, state, scratch, x, out);
            backend_.add(x, out);
        }
        feed_forward(backend_, config_, w, scratch, x, out);
    }
    add_scaled(x, out);
    if (w.embd_gate) {
        const Tensor first = scratch.f32(x.rows, x.cols);
        embed(batch, scratch, first);
        add_layer_embedding(backend_, config_, weights_, layer, batch.tokens, first, scratch, x, out);
    }
    if (w.output_scale != 1) backend_.scale(x, w.output_scale);
}

void Decoder::add_scaled(Tensor x, Tensor out) const {
    if (config_.residual_scale != 1) backend_.scale(out, config_.residual_scale);
    backend_.add(x, out);
}

// q = norm(clamp(x W_Q + b)), rotated, and other projections of x, which last longer: all one product. Of q
// with a latent of its own the latent is one of them.
std::vector<Tensor> Decoder::queries_and(std::span<const Projection> others, Scratch& lasting,
                                         const AttnWeights& w, const Rope& rope, const AttnInput& in,
                                         Tensor x) const {
    const Tensor q = in.scratch.f32(x.rows, w.q.rows);
    std::vector<Product> products = {{w.q, w.q_bias, q}};
    if (w.q_a) products[0] = {w.q_a, {}, in.scratch.f32(x.rows, w.q_a.rows)};
    for (const auto& [weight, bias] : others)
        products.push_back({weight, bias, lasting.f32(x.rows, weight.rows)});
    backend_.linear(x, products);
    if (w.q_a) {
        const Tensor latent = std::exchange(products[0].out, q);
        backend_.norm(NormKind::rms, latent, w.q_a_norm, {}, in.config.latent_eps, latent);
        backend_.linear(latent, w.q, w.q_bias, q);
    }
    clamp(backend_, in.config, {&q, 1});
    norm_heads(backend_, in.config, w.q_norm, q, q);
    if (rope) backend_.rope(q, in.config.n_heads, rope, in.positions);
    std::vector<Tensor> out;
    for (const Product& product : products) out.push_back(product.out);
    return out;
}

void Decoder::store(const Written& written, const KvCache& cache, int layer, Tensor slots) const {
    for (size_t plane = 0; plane < written.planes.size(); ++plane)
        backend_.store(written.planes[plane], cache.slots(layer, int(plane), slots));
}

// out = norm(norm(read(norm(x))) W_O), with the norms that there are. Until W_O, out holds the normed input.
void Decoder::attention(int layer, const Batch& batch, StepState& state, Scratch& scratch, Tensor x,
                        Tensor out) const {
    const Scratch::Scope scope(scratch);
    const LayerWeights& w = weights_.layers[layer];
    const auto& [mode, config, owner, shared, rotates_keys] = choices_.layers[layer];
    const Prepared& prepared = *w.attn_prepared;
    const GroupBatch& group = batch.groups[cache_->group_of(owner)];
    const Tensor in = norm(backend_, config_, w.attn_norm, x, out);
    if (state.observer.attention_input) state.observer.attention_input(layer, in);

    const Tensor heads = scratch.f32(x.rows, config.value_width());
    Scratch lasting = shared ? scratch.other_end() : scratch;
    const int turn = config_.layers[layer].rope;
    const Rope& of_queries = turn < 0 ? kNoRope : query_ropes_[turn];
    const Rope& of_keys = turn < 0 || !rotates_keys ? kNoRope : ropes_[turn];
    const auto step = [&, &config = config](Scratch& of) {
        return AttnInput{config, prepared, of_keys, batch.positions, group.sequences, batch.chunk, of};
    };
    const bool owns = owner == layer;
    const auto others = owns ? mode->projections(prepared) : std::vector<Projection>{};
    std::vector<Tensor> projected = queries_and(others, lasting, w.attn, of_queries, step(scratch), in);
    const Tensor q = projected[0];
    auto& [dense, written] = state.owners[owner];
    if (owns) {
        projected.erase(projected.begin());
        written = mode->write(backend_, {step(lasting), in, projected, shared});
        if (group.slots) store(written, *cache_, layer, group.slots);
    }
    std::vector<StoredRegion> older;
    for (const OlderRows& rows : group.older)
        older.push_back({rows.c > 0, rows.origin, rows.sequences, cache_->rows(owner, rows.c)});
    mode->read(backend_,
               {step(scratch), w.attn.relative_bias, w.attn.sinks, cache_->rows(owner), older, dense, q},
               written, heads);
    norm(backend_, config_, w.attn_sub_norm, heads, heads);
    backend_.linear(heads, w.attn.o, w.attn.o_bias, out);
    norm(backend_, config_, w.attn_post_norm, out, out);
}

// out = read(norm(x)) W_O over the rows of an encoder's output. Until W_O, out holds the normed input.
void Decoder::cross_attention(int layer, const Batch& batch, StepState& state, Scratch& scratch, Tensor x,
                              Tensor out) const {
    const Scratch::Scope scope(scratch);
    const LayerWeights& w = weights_.layers[layer];
    const LayerChoice& choice = choices_.cross[layer];
    const AttnConfig& config = choice.config;
    const Tensor in = norm(backend_, config_, w.cross_norm, x, out);
    if (state.observer.cross_input) state.observer.cross_input(layer, in);
    const Tensor heads = scratch.f32(x.rows, config.q_width());
    const AttnInput step{config, *w.cross_prepared, kNoRope, batch.positions, batch.encoder_states, false,
                         scratch};
    const Tensor q = queries_and({}, scratch, w.cross, kNoRope, step, in)[0];
    DenseRows none;
    choice.mode->read(backend_, {step, {}, {}, encoder_states_->rows(choice.owner), {}, none, q}, {}, heads);
    backend_.linear(heads, w.cross.o, w.cross.o_bias, out);
}

void Decoder::cross_scores(int layer, int head, Tensor x, const AttentionSequence& states, Scratch& scratch,
                           Tensor out) const {
    const Scratch::Scope scope(scratch);
    const LayerWeights& w = weights_.layers[layer];
    const auto& [mode, c, owner, shared, rotates] = choices_.cross[layer];
    const Rows stored = encoder_states_->rows(owner)[0];
    const Tensor rows = scratch.f32(out.cols, stored.width), q = scratch.f32(x.rows, c.head_dim);
    backend_.load(stored, states.table, states.begin, states.end, rows);
    const Tensor k = mode->keys(backend_, *w.cross_prepared, scratch, rows);
    const int first = head * c.head_dim;
    const Tensor bias = w.cross.q_bias ? w.cross.q_bias.cols_of(first, c.head_dim) : Tensor{};
    backend_.linear(x, w.cross.q.rows_of(first, c.head_dim), bias, q);
    backend_.scale(q, c.scale);
    backend_.linear(q, k.cols_of(head / (c.n_heads / c.n_kv_heads) * c.head_dim, c.head_dim), {}, out);
}

void Decoder::store_encoder_states(Tensor states, Tensor slots, Scratch& scratch) const {
    for (const LayerChoice& choice : choices_.cross) {
        if (!choice.owns()) continue;
        const Scratch::Scope scope(scratch);
        const Prepared& prepared = *weights_.layers[choice.owner].cross_prepared;
        const auto projected = project(backend_, scratch, states, choice.mode->projections(prepared));
        const AttnInput step{choice.config, prepared, kNoRope, {}, {}, false, scratch};
        store(choice.mode->write(backend_, {step, states, projected}), *encoder_states_, choice.owner, slots);
    }
}

void Decoder::finish(Tensor x) const { norm(backend_, config_, weights_.output_norm, x, x); }

void Decoder::logits(Tensor states, Tensor out) const {
    if (weights_.output_scale != 1) backend_.scale(states, weights_.output_scale);
    backend_.linear(states, weights_.output, weights_.output_bias, out);
    if (config_.logit_cap == 0) return;
    backend_.scale(out, 1 / config_.logit_cap);
    backend_.activate(Activation::tanh, out);
    backend_.scale(out, config_.logit_cap);
}

Decoder::Decoder(const GgufFile& file, const CacheOptions& options, Backend& backend,
                 const ExtraTensors& extra)
    : backend_(backend),
      config_(read_config(file)),
      options_(options),
      choices_(choose_caches(file, config_, options, extra)) {
    options_.n_ctx = choices_.n_ctx;
    options_.n_source = choices_.n_source;
    weights_ = load_weights(file, config_, backend, choices_, extra);
    load_ropes(file);
    spans_ = spans_of(choices_.layers);
    size_t recoding_bytes = 0;
    for (const LayerChoice& choice : choices_.layers)
        recoding_bytes = std::max(recoding_bytes, choice.mode->recoding_scratch(choice.config));
    if (recoding_bytes > 0) recoding_scratch_ = Scratch(backend, recoding_bytes);
    const auto recode = [this](int layer, const Recoding& rows) {
        const LayerChoice& choice = choices_.layers[layer];
        const Prepared& prepared = *weights_.layers[layer].attn_prepared;
        const AttnInput in{choice.config, prepared, kNoRope, {}, {}, false, recoding_scratch_};
        choice.mode->recode(backend_, in, rows);
    };
    cache_ = std::make_unique<KvCache>(backend, rows_of(choices_.layers), options_.n_ctx, options_.n_seqs,
                                       options_.cache_tokens, step_limits(), recode);
    if (options_.cache_tokens == 0) options_.cache_tokens = options_.n_ctx * options_.n_seqs;
    if (!choices_.cross.empty()) {
        encoder_states_ =
            std::make_unique<KvCache>(backend, rows_of(choices_.cross), options_.n_source, options_.n_seqs, 0,
                                      StepLimits{options_.n_source, options_.n_source});
        encoder_ = std::make_unique<Encoder>(backend, config_, weights_, ropes_.empty() ? kNoRope : ropes_[0],
                                             options_.n_batch);
    }
}

void Decoder::load_ropes(const GgufFile& file) {
    for (const RopeConfig& rope : config_.ropes) {
        RopeFrequencies frequencies = rope_frequencies(config_, rope, file, options_.n_ctx);
        ropes_.push_back(load_rope(frequencies));
        frequencies.growth = config_.query_growth;
        frequencies.growth_length = config_.query_growth_length;
        if (config_.latent) frequencies.unturned = (config_.head_dim - rope.n_rot) / 2;
        query_ropes_.push_back(frequencies.growth ? load_rope(frequencies) : ropes_.back());
    }
}

Rope Decoder::load_rope(const RopeFrequencies& frequencies) {
    const int64_t n = std::max(options_.n_ctx, options_.n_source);
    const int n_rot = 2 * (frequencies.unturned + int(frequencies.pairs.size()));
    rope_buffers_.push_back(backend_.alloc(MemoryKind::derived, n * n_rot * sizeof(float), "RoPE table"));
    const Tensor table(rope_buffers_.back().data.get(), DType::F32, n, n_rot);
    if (!backend_.dry()) backend_.upload(table, frequencies.table(n).data(), table.bytes());
    const int first = config_.latent ? config_.head_dim - n_rot : 0;  // the last columns rotate
    return {table, n_rot, config_.architecture->positions == Positions::rope_interleaved, first};
}

}  // namespace slimrt
