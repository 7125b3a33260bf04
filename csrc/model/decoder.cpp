#include "model/decoder.h"

#include <algorithm>
#include <cassert>

#include "core/error.h"
#include "model/architecture.h"

namespace slimrt {

namespace {

/// The n_batch tokens from `first` on. What comes before them in a sequence is stored by then.
Batch chunk_of(const Batch& batch, int64_t first, int64_t n_batch) {
    const int64_t n = std::min(n_batch, batch.tokens.cols - first);
    if (n == batch.tokens.cols) return batch;
    Batch chunk{.tokens = batch.tokens.cols_of(first, n),
                .positions = batch.positions.cols_of(first, n),
                .groups = batch.groups,
                .sources = batch.sources,
                .chunk = true};
    for (GroupBatch& group : chunk.groups) {
        assert(group.sequences.size() == 1);
        AttentionSequence& s = group.sequences[0];
        group.slots = group.slots.cols_of(first, n);
        s.n_queries = int(n);
        s.position += first;
        s.end += first;
        s.place = -1;
    }
    for (AttentionSequence& s : chunk.sources) {
        s.n_queries = int(n);
        s.place = -1;
    }
    return chunk;
}

}  // namespace

// x = embed(tokens); layers; logits = norm(x) W_out.
void Decoder::forward(const Batch& batch, Scratch& scratch, Tensor x) const {
    const int64_t n = x.rows, n_batch = options_.n_batch;
    for (int layer = 0; layer < config_.n_layers; ++layer) {
        const Scratch::Scope scope(scratch);
        DenseRows dense;
        for (const Plane& plane : choices_.layers[layer].mode->materialised(choices_.layers[layer].config))
            dense.planes.push_back(scratch.take(plane.type, options_.n_ctx, plane.width));
        for (int64_t first = 0; first < n; first += n_batch) {
            const Batch chunk = chunk_of(batch, first, n_batch);
            const Tensor rows = x.rows_of(first, chunk.tokens.cols);
            if (poll) poll((layer + double(first) / n) / config_.n_layers);
            if (layer == 0) embed(chunk, scratch, rows);
            add_layer(layer, chunk, dense, scratch, rows);
        }
    }
}

int64_t Decoder::longest_step() const {
    constexpr int64_t kLeast = 1 << 10, kMost = 1 << 14;
    for (const LayerChoice& layer : choices_.layers)
        if (!layer.mode->materialised(layer.config).empty())
            return std::max<int64_t>(options_.n_batch,
                                     std::min(options_.n_ctx, std::clamp(options_.n_ctx / 4, kLeast, kMost)));
    return options_.n_batch;
}

uint64_t Decoder::fold_of_rows(int layer) const {
    const AttnWeights& w = weights_.layers[layer].attn;
    uint64_t hash = 0;
    for (const Tensor& t : {w.row_shrink, w.residual_x, w.residual_k, w.row_in}) {
        if (!t) continue;
        std::vector<unsigned char> row(t.stride);  // the first one tells folds apart
        backend_.download(row.data(), t, row.size());
        for (const unsigned char byte : row) hash = (hash ^ byte) * 0x100000001b3 + 1;  // as FNV-1a
    }
    return hash;
}

void Decoder::embed(const Batch& batch, Scratch& scratch, Tensor x) const {
    backend_.gather(weights_.token_embd, batch.tokens, x);
    if (!weights_.position_embd) return;
    const Scratch::Scope scope(scratch);
    const Tensor p = scratch.f32(x.rows, x.cols);
    backend_.gather(weights_.position_embd, batch.positions, p);
    backend_.add(x, p);
}

// x += attention(x), x += cross_attention(x) beside an encoder, x += ffn(x); in parallel: x += attention(x) +
// ffn(x).
void Decoder::add_layer(int layer, const Batch& batch, DenseRows& dense, Scratch& scratch, Tensor x) const {
    const Scratch::Scope scope(scratch);
    const Tensor out = scratch.f32(x.rows, x.cols);
    attention(layer, batch, dense, scratch, x, out);
    const LayerWeights& w = weights_.layers[layer];
    if (config_.parallel_residual) {
        const Tensor other = scratch.f32(x.rows, x.cols);
        feed_forward(backend_, config_, w, scratch, x, other);
        backend_.add(x, other);
    } else {
        backend_.add(x, out);
        if (choices_.cross.mode) {
            cross_attention(layer, batch, scratch, x, out);
            backend_.add(x, out);
        }
        feed_forward(backend_, config_, w, scratch, x, out);
    }
    backend_.add(x, out);
}

// out = norm(attend(norm(x)) W_O), with the norms that there are. Until W_O, out holds the normed input.
void Decoder::attention(int layer, const Batch& batch, DenseRows& dense, Scratch& scratch, Tensor x,
                        Tensor out) const {
    const Scratch::Scope scope(scratch);
    const LayerWeights& w = weights_.layers[layer];
    const AttnConfig& c = choices_.layers[layer].config;
    const Tensor in = norm(backend_, config_, w.attn_norm, x, out);
    if (observe_attention) observe_attention(layer, in);

    const Tensor heads = scratch.f32(x.rows, c.q_width());
    const std::vector<Rows> rows = cache_->rows(layer);
    const GroupBatch& group = batch.groups[cache_->group_of(layer)];
    const FreshRows fresh = choices_.layers[layer].mode->attend(
        backend_, {c, w.attn, rope_, batch, group, rows, dense, scratch, in}, heads);
    for (size_t plane = 0; plane < fresh.size(); ++plane)
        backend_.store(fresh[plane], cache_->slots(layer, int(plane), group.slots));

    backend_.linear(heads, w.attn.o, w.attn.o_bias, out);
    norm(backend_, config_, w.attn_post_norm, out, out);
}

// out = attend(norm(x)) W_O over the rows of an encoder's output. Until W_O, out holds the normed input.
void Decoder::cross_attention(int layer, const Batch& batch, Scratch& scratch, Tensor x, Tensor out) const {
    const Scratch::Scope scope(scratch);
    const LayerWeights& w = weights_.layers[layer];
    const CrossMode& mode = *choices_.cross.mode;
    const AttnConfig c = choices_.cross.of(layer);
    const Tensor in = norm(backend_, config_, w.cross_norm, x, out);
    if (observe_cross) observe_cross(layer, in);
    const Tensor heads = scratch.f32(x.rows, c.q_width());
    const std::vector<Rows> rows = sources_->rows(mode.shared() ? 0 : layer);
    mode.attend(backend_, {c, w.cross, batch.sources, rows, scratch, in}, heads);
    backend_.linear(heads, w.cross.o, w.cross.o_bias, out);
}

void Decoder::cross_scores(int layer, int head, Tensor x, const AttentionSequence& source, Scratch& scratch,
                           Tensor out) const {
    const Scratch::Scope scope(scratch);
    const AttnWeights& w = weights_.layers[layer].cross;
    const AttnConfig& c = choices_.cross.config;
    const CrossMode& mode = *choices_.cross.mode;
    const Rows stored = sources_->rows(mode.shared() ? 0 : layer)[0];
    const Tensor rows = scratch.f32(out.cols, stored.width), q = scratch.f32(x.rows, c.head_dim);
    backend_.load(stored, source.table, source.begin, source.end, rows);
    const Tensor k = mode.keys(backend_, w, scratch, rows);
    const int first = head * c.head_dim;
    const Tensor bias = w.q_bias ? w.q_bias.cols_of(first, c.head_dim) : Tensor{};
    backend_.linear(x, w.q.rows_of(first, c.head_dim), bias, q);
    backend_.scale(q, c.scale);
    backend_.linear(q, k.cols_of(head / (c.n_heads / c.n_kv_heads) * c.head_dim, c.head_dim), {}, out);
}

void Decoder::store_source(Tensor states, Tensor slots, Scratch& scratch) const {
    const CrossMode& mode = *choices_.cross.mode;
    for (int layer = 0; layer < (mode.shared() ? 1 : config_.n_layers); ++layer) {
        const Scratch::Scope scope(scratch);
        const FreshRows planes = mode.rows(backend_, weights_.layers[layer].cross, scratch, states);
        for (size_t plane = 0; plane < planes.size(); ++plane)
            backend_.store(planes[plane], sources_->slots(layer, int(plane), slots));
    }
}

void Decoder::finish(Tensor x) const { norm(backend_, config_, weights_.output_norm, x, x); }

void Decoder::logits(Tensor states, Tensor out) const {
    if (weights_.output_scale != 1) backend_.scale(states, weights_.output_scale);
    backend_.linear(states, weights_.output, weights_.output_bias, out);
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
    load_rope(file);
    std::vector<LayerRows> layers;
    for (const LayerChoice& layer : choices_.layers)
        layers.push_back({layer.mode->format(layer.config), layer.config.window});
    cache_ = std::make_unique<KvCache>(backend, layers, options_.n_ctx, options_.n_seqs, longest_step());
    if (const auto& [mode, config] = choices_.cross; mode) {
        const int n = mode->shared() ? 1 : config_.n_layers;
        sources_ = std::make_unique<KvCache>(backend, std::vector<LayerRows>(n, {mode->format(config)}),
                                             options_.n_source, options_.n_seqs, options_.n_source);
        encoder_ = std::make_unique<Encoder>(backend, config_, weights_, rope_, options_.n_batch);
    }
}

void Decoder::load_rope(const GgufFile& file) {
    const Positions positions = config_.architecture->positions;
    const int n_rot = config_.rope.n_rot;
    if (n_rot == 0) return;
    const int64_t n = std::max(options_.n_ctx, options_.n_source);
    rope_buffer_ = backend_.alloc(MemoryKind::derived, n * n_rot * sizeof(float), "RoPE table");
    rope_ = {Tensor(rope_buffer_.data.get(), DType::F32, n, n_rot), n_rot,
             positions == Positions::rope_interleaved};
    const RopeFrequencies frequencies = rope_frequencies(config_, file, options_.n_ctx);
    if (!backend_.dry()) backend_.upload(rope_.table, frequencies.table(n).data(), rope_.table.bytes());
}

std::vector<std::pair<std::string, std::string>> cache_refusals(const ModelConfig& config) {
    std::vector<std::pair<std::string, std::string>> out;
    for (const CacheMode* mode : cache_modes()) {
        std::string reason = mode->refusal(attention_config(config, 0));
        if (!reason.empty()) reason = "layer 0: " + reason;
        out.emplace_back(mode->name(), reason);
    }
    return out;
}

}  // namespace slimrt
