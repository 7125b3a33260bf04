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

/// What each layer stores: nothing where it reads another layer's rows.
std::vector<LayerRows> rows_of(const std::vector<LayerChoice>& layers, const Decoder& decoder) {
    std::vector<LayerRows> rows;
    for (const LayerChoice& layer : layers) {
        const auto& [mode, config, owner, shared, rotates] = layer;
        Backend* const backend = decoder.part_of(config.layer).backend;
        const bool sparse = config.sparse_threshold > 0 || config.sparse_delta > 0;
        rows.push_back({backend,
                        {},
                        config.window,
                        mode->regions(config),
                        sparse && mode->has_values_of_all() && backend->on_host()});  // CUDA reads all rows
        if (!layer.owns()) continue;
        rows.back().formats = mode->older_formats(config);
        rows.back().formats.insert(rows.back().formats.begin(), mode->format(config));
    }
    return rows;
}

/// Up to n_batch tokens from `first` on. Rows of the tokens before them are stored already.
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

// x = embed(tokens), then the layers. Layers that share rows go through a chunk together, since written rows
// live no longer than it.
void Decoder::forward(const Part& part, const Batch& batch, Scratch& scratch, Tensor x,
                      const StepObserver& observer) const {
    const int64_t n = x.rows, n_batch = options_.n_batch;
    Scratch lasting = scratch.other_end();
    for (const LayerSpan& span : part.spans) {
        const Scratch::Scope scope(scratch);
        StepState state{observer, {}};
        allocate_dense_rows(span, scratch, state);
        for (int64_t first = 0; first < n; first = next_chunk(first, n, n_batch, part.backend->dry())) {
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

void Decoder::allocate_dense_rows(const LayerSpan& span, Scratch& scratch, StepState& state) const {
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

const Part& Decoder::part_of(int layer) const {
    return *std::ranges::find_if(parts_, [&](const Part& part) { return layer < part.end(); });
}

uint64_t Decoder::fold_of_rows(int layer) const {
    return weights_.layers[layer].attn_prepared->fingerprint(*part_of(layer).backend);
}

void Decoder::embed(const Batch& batch, Scratch& scratch, Tensor x) const {
    Backend& backend = *parts_.front().backend;
    backend.gather(weights_.token_embd, batch.tokens, x);
    if (config_.embedding_scale != 1) backend.scale(x, config_.embedding_scale);
    add_positions(backend, config_, weights_.position_embd, weights_.embd_norm, batch.positions, scratch, x);
}

// x += attention(x), with an encoder x += cross_attention(x), x += ffn(x); with parallel residuals x +=
// attention(x) + ffn(x). What is added may be scaled, and each sum normed. Then per-layer embeddings and the
// layer's output scale, where the model has them.
void Decoder::add_layer(int layer, const Batch& batch, StepState& state, Scratch& scratch, Tensor x) const {
    Backend& backend = *part_of(layer).backend;
    const Scratch::Scope scope(scratch);
    const Tensor out = scratch.f32(x.rows, x.cols);
    attention(layer, batch, state, scratch, x, out);
    const LayerWeights& w = weights_.layers[layer];
    if (config_.parallel_residual) {
        const Tensor other = scratch.f32(x.rows, x.cols);
        feed_forward(backend, config_, w, scratch, x, other);
        add_scaled(backend, x, other);
    } else {
        add_scaled(backend, x, out);
        norm(backend, config_, w.attn_sum_norm, x, x);
        if (!choices_.cross.empty()) {
            cross_attention(layer, batch, state, scratch, x, out);
            backend.add(x, out);
            norm(backend, config_, w.cross_sum_norm, x, x);
        }
        feed_forward(backend, config_, w, scratch, x, out);
    }
    add_scaled(backend, x, out);
    norm(backend, config_, w.ffn_sum_norm, x, x);
    if (w.embd_gate) {
        const Tensor first = scratch.f32(x.rows, x.cols);
        embed(batch, scratch, first);
        add_layer_embedding(backend, config_, weights_, layer, batch.tokens, first, scratch, x, out);
    }
    if (w.output_scale != 1) backend.scale(x, w.output_scale);
}

void Decoder::add_scaled(Backend& backend, Tensor x, Tensor out) const {
    if (config_.residual_scale != 1) backend.scale(out, config_.residual_scale);
    backend.add(x, out);
}

// q = rope(norm(clamp(x W_Q + b))), and other projections of x into `lasting`, in one product that reads x
// once. Where q is made of a latent (MLA), the product gives the latent and a second one q. Returns q first.
std::vector<Tensor> Decoder::project_queries(Backend& backend, std::span<const Projection> others,
                                             Scratch& lasting, const AttnWeights& w, const Rope& rope,
                                             const AttnInput& in, Tensor x) const {
    const Tensor q = in.scratch.f32(x.rows, w.q.rows);
    std::vector<Product> products = {{w.q, w.q_bias, q}};
    if (w.q_a) products[0] = {w.q_a, {}, in.scratch.f32(x.rows, w.q_a.rows)};
    for (const auto& [weight, bias] : others)
        products.push_back({weight, bias, lasting.f32(x.rows, weight.rows)});
    backend.linear(x, products);
    if (w.q_a) {
        const Tensor latent = std::exchange(products[0].out, q);
        backend.norm(NormKind::rms, latent, w.q_a_norm, {}, in.config.latent_eps, latent);
        backend.linear(latent, w.q, w.q_bias, q);
    }
    clamp(backend, in.config, {&q, 1});
    norm_heads(backend, in.config, w.q_norm, q, q);
    if (rope) backend.rope(q, in.config.n_heads, rope, in.positions);
    std::vector<Tensor> out;
    for (const Product& product : products) out.push_back(product.out);
    return out;
}

void Decoder::store(const Written& written, const KvCache& cache, int layer, Tensor slots) const {
    for (size_t plane = 0; plane < written.planes.size(); ++plane)
        part_of(layer).backend->store(written.planes[plane], cache.slots(layer, int(plane), slots));
}

// out = post_norm(sub_norm(read(norm(x))) W_O), without the norms that a model does not have. `out` holds the
// normed input until W_O.
void Decoder::attention(int layer, const Batch& batch, StepState& state, Scratch& scratch, Tensor x,
                        Tensor out) const {
    const Part& part = part_of(layer);
    Backend& backend = *part.backend;
    const Scratch::Scope scope(scratch);
    const LayerWeights& w = weights_.layers[layer];
    const auto& [mode, config, owner, shared, rotates_keys] = choices_.layers[layer];
    const Prepared& prepared = *w.attn_prepared;
    const GroupBatch& group = batch.groups[cache_->group_of(owner)];
    const Tensor in = norm(backend, config_, w.attn_norm, x, out);
    if (state.observer.attention_input) state.observer.attention_input(layer, in);

    const Tensor heads = scratch.f32(x.rows, config.value_width());
    Scratch lasting = shared ? scratch.other_end() : scratch;
    const int rope = config_.layers[layer].rope;
    const Rope& query_rope = rope < 0 ? kNoRope : part.query_ropes[rope];
    const Rope& key_rope = rope < 0 || !rotates_keys ? kNoRope : part.ropes[rope];
    const auto step = [&, &config = config](Scratch& of) {
        return AttnInput{config, prepared, key_rope, batch.positions, group.sequences, batch.chunk, of};
    };
    const bool owns = owner == layer;
    const auto others = owns ? mode->projections(prepared) : std::vector<Projection>{};
    std::vector<Tensor> projected =
        project_queries(backend, others, lasting, w.attn, query_rope, step(scratch), in);
    const Tensor q = projected[0];
    auto& [dense, written] = state.owners[owner];
    if (owns) {
        projected.erase(projected.begin());
        written = mode->write(backend, {step(lasting), in, projected, shared});
        if (group.slots) store(written, *cache_, layer, group.slots);
    }
    std::vector<StoredRegion> older;
    for (const OlderRows& rows : group.older)
        older.push_back({rows.c > 0, rows.origin, rows.sequences, cache_->rows(owner, rows.c)});
    mode->read(backend,
               {step(scratch), w.attn.relative_bias, w.attn.sinks, cache_->rows(owner), older, dense, q},
               written, heads);
    norm(backend, config_, w.attn_sub_norm, heads, heads);
    backend.linear(heads, w.attn.o, w.attn.o_bias, out);
    norm(backend, config_, w.attn_post_norm, out, out);
}

// out = read(norm(x)) W_O over the encoder's output. `out` holds the normed input until W_O.
void Decoder::cross_attention(int layer, const Batch& batch, StepState& state, Scratch& scratch, Tensor x,
                              Tensor out) const {
    Backend& backend = *part_of(layer).backend;
    const Scratch::Scope scope(scratch);
    const LayerWeights& w = weights_.layers[layer];
    const LayerChoice& choice = choices_.cross[layer];
    const AttnConfig& config = choice.config;
    const Tensor in = norm(backend, config_, w.cross_norm, x, out);
    if (state.observer.cross_input) state.observer.cross_input(layer, in);
    const Tensor heads = scratch.f32(x.rows, config.q_width());
    const AttnInput step{config, *w.cross_prepared, kNoRope, batch.positions, batch.encoder_states, false,
                         scratch};
    const Tensor q = project_queries(backend, {}, scratch, w.cross, kNoRope, step, in)[0];
    DenseRows none;
    choice.mode->read(backend, {step, {}, {}, encoder_states_->rows(choice.owner), {}, none, q}, {}, heads);
    backend.linear(heads, w.cross.o, w.cross.o_bias, out);
}

void Decoder::cross_scores(int layer, int head, Tensor x, const AttentionSequence& states, Scratch& scratch,
                           Tensor out) const {
    Backend& backend = *part_of(layer).backend;
    const Scratch::Scope scope(scratch);
    const LayerWeights& w = weights_.layers[layer];
    const auto& [mode, c, owner, shared, rotates] = choices_.cross[layer];
    const Rows stored = encoder_states_->rows(owner)[0];
    const Tensor rows = scratch.f32(out.cols, stored.width), q = scratch.f32(x.rows, c.head_dim);
    backend.load(stored, states.table, states.begin, states.end, rows);
    const Tensor k = mode->keys(backend, *w.cross_prepared, scratch, rows);
    const int first = head * c.head_dim;
    const Tensor bias = w.cross.q_bias ? w.cross.q_bias.cols_of(first, c.head_dim) : Tensor{};
    backend.linear(x, w.cross.q.rows_of(first, c.head_dim), bias, q);
    backend.scale(q, c.scale);
    backend.linear(q, k.cols_of(head / (c.n_heads / c.n_kv_heads) * c.head_dim, c.head_dim), {}, out);
}

void Decoder::store_encoder_states(Tensor states, Tensor slots, Scratch& scratch) const {
    Backend& backend = *parts_.front().backend;
    for (const LayerChoice& choice : choices_.cross) {
        if (!choice.owns()) continue;
        const Scratch::Scope scope(scratch);
        const Prepared& prepared = *weights_.layers[choice.owner].cross_prepared;
        const auto projected = project(backend, scratch, states, choice.mode->projections(prepared));
        const AttnInput step{choice.config, prepared, kNoRope, {}, {}, false, scratch};
        store(choice.mode->write(backend, {step, states, projected}), *encoder_states_, choice.owner, slots);
    }
}

void Decoder::final_norm(Tensor x) const {
    norm(*parts_.back().backend, config_, weights_.output_norm, x, x);
}

void Decoder::logits(Tensor states, Tensor out) const {
    Backend& backend = *parts_.back().backend;
    if (weights_.output_scale != 1) backend.scale(states, weights_.output_scale);
    backend.linear(states, weights_.output, weights_.output_bias, out);
    if (config_.logit_cap == 0) return;
    backend.scale(out, 1 / config_.logit_cap);
    backend.activate(Activation::tanh, out);
    backend.scale(out, config_.logit_cap);
}

Decoder::Decoder(const GgufFile& file, const CacheOptions& options, std::span<const BackendLayers> shares,
                 const ExtraTensors& extra)
    : config_(read_config(file)), options_(options), choices_(choose_caches(file, config_, options, extra)) {
    options_.n_ctx = choices_.n_ctx;
    options_.n_source = choices_.n_source;
    parts_ = parts_of(config_, choices_.layers, shares);
    std::vector<Backend*> backends(std::max(config_.n_layers, 1), parts_.front().backend);
    for (int layer = 0; layer < config_.n_layers; ++layer) backends[layer] = part_of(layer).backend;
    weights_ = load_weights(file, config_, backends, choices_, extra);
    for (Part& part : parts_) {
        load_ropes(part, config_, file, options_.n_ctx, std::max(options_.n_ctx, options_.n_source));
        size_t bytes = 0;
        for (int layer = part.begin(); layer < part.end(); ++layer)
            bytes =
                std::max(bytes, choices_.layers[layer].mode->recoding_scratch(choices_.layers[layer].config));
        if (bytes > 0) part.recoding = Scratch(*part.backend, bytes);
    }
    const auto recode = [this](int layer, const Recoding& rows) {
        const LayerChoice& choice = choices_.layers[layer];
        const Part& part = part_of(layer);
        Scratch scratch = part.recoding;
        const AttnInput in{choice.config, *weights_.layers[layer].attn_prepared, kNoRope, {}, {}, false,
                           scratch};
        choice.mode->recode(*part.backend, in, rows);
    };
    cache_ = std::make_unique<KvCache>(rows_of(choices_.layers, *this), options_.n_ctx, options_.n_seqs,
                                       options_.cache_tokens, step_limits(), recode);
    if (options_.cache_tokens == 0) options_.cache_tokens = options_.n_ctx * options_.n_seqs;
    if (!choices_.cross.empty())
        encoder_states_ =
            std::make_unique<KvCache>(rows_of(choices_.cross, *this), options_.n_source, options_.n_seqs, 0,
                                      StepLimits{options_.n_source, options_.n_source});
    if (config_.n_encoder_layers > 0) {
        const Part& part = parts_.front();
        encoder_ = std::make_unique<Encoder>(*part.backend, config_, weights_,
                                             part.ropes.empty() ? kNoRope : part.ropes[0], options_.n_batch);
    }
}

}  // namespace slimrt
