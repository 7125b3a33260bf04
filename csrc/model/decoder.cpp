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
    assert(batch.sequences.size() == 1);
    AttentionSequence s = batch.sequences[0];
    s.n_queries = int(n);
    s.position += first;
    s.end += first;
    return {batch.tokens.cols_of(first, n),
            batch.positions.cols_of(first, n),
            batch.slots.cols_of(first, n),
            {s},
            true};
}

}  // namespace

// x = embed(tokens); layers; logits = norm(x) W_out.
void Decoder::forward(const Batch& batch, Scratch& scratch, Tensor x) const {
    const int64_t n = x.rows, n_batch = options_.n_batch;
    for (int layer = 0; layer < config_.n_layers; ++layer) {
        const Scratch::Scope scope(scratch);
        DenseRows dense;
        for (const Plane& plane : modes_[layer]->materialised(attn_[layer]))
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
    for (size_t layer = 0; layer < modes_.size(); ++layer)
        if (!modes_[layer]->materialised(attn_[layer]).empty())
            return std::max<int64_t>(options_.n_batch,
                                     std::min(options_.n_ctx, std::clamp(options_.n_ctx / 4, kLeast, kMost)));
    return options_.n_batch;
}

void Decoder::embed(const Batch& batch, Scratch& scratch, Tensor x) const {
    backend_.gather(weights_.token_embd, batch.tokens, x);
    if (!weights_.position_embd) return;
    const Scratch::Scope scope(scratch);
    const Tensor p = scratch.f32(x.rows, x.cols);
    backend_.gather(weights_.position_embd, batch.positions, p);
    backend_.add(x, p);
}

// x += attention(x), x += ffn(x); in parallel: x += attention(x) + ffn(x).
void Decoder::add_layer(int layer, const Batch& batch, DenseRows& dense, Scratch& scratch, Tensor x) const {
    const Scratch::Scope scope(scratch);
    const Tensor out = scratch.f32(x.rows, x.cols);
    attention(layer, batch, dense, scratch, x, out);
    if (config_.parallel_residual) {
        const Tensor other = scratch.f32(x.rows, x.cols);
        feed_forward(layer, scratch, x, other);
        backend_.add(x, other);
    } else {
        backend_.add(x, out);
        feed_forward(layer, scratch, x, out);
    }
    backend_.add(x, out);
}

// out = norm(attend(norm(x)) W_O), with the norms that there are. Until W_O, out holds the normed input.
void Decoder::attention(int layer, const Batch& batch, DenseRows& dense, Scratch& scratch, Tensor x,
                        Tensor out) const {
    const Scratch::Scope scope(scratch);
    const LayerWeights& w = weights_.layers[layer];
    const AttnConfig& c = attn_[layer];
    const Tensor in = norm(w.attn_norm, x, out);
    if (observe_attention) observe_attention(layer, in);

    const Tensor heads = scratch.f32(x.rows, c.q_width());
    const std::vector<Rows> rows = cache_->rows(layer);
    const FreshRows fresh =
        modes_[layer]->attend(backend_, {c, w.attn, rope_, batch, rows, dense, scratch, in}, heads);
    for (size_t plane = 0; plane < fresh.size(); ++plane)
        backend_.store(fresh[plane], cache_->slots(layer, int(plane), batch.slots));

    backend_.linear(heads, w.attn.o, w.attn.o_bias, out);
    norm(w.attn_post_norm, out, out);
}

// out = norm(W_down act(W_up norm(x))), gated or not.
void Decoder::feed_forward(int layer, Scratch& scratch, Tensor x, Tensor out) const {
    const Scratch::Scope scope(scratch);
    const LayerWeights& w = weights_.layers[layer];
    const Tensor in = norm(w.ffn_norm, x, out);
    const Tensor up = scratch.f32(x.rows, config_.d_ff);
    Tensor inner = up;
    if (w.gate) {
        inner = scratch.f32(x.rows, config_.d_ff);
        const Product products[] = {{w.up, w.up_bias, up}, {w.gate, w.gate_bias, inner}};
        backend_.linear(in, products);
        backend_.gate(config_.activation, inner, up);
    } else {
        backend_.linear(in, w.up, w.up_bias, up);
        backend_.activate(config_.activation, up);
    }
    backend_.linear(inner, w.down, w.down_bias, out);
    norm(w.ffn_post_norm, out, out);
}

Tensor Decoder::norm(const Norm& w, Tensor x, Tensor out) const {
    if (!w.weight) return x;
    backend_.norm(config_.architecture->norm, x, w.weight, w.bias, config_.norm_eps, out);
    return out;
}

void Decoder::logits(Tensor x, Tensor out) const {
    norm(weights_.output_norm, x, x);
    backend_.linear(x, weights_.output, weights_.output_bias, out);
}

namespace {

/// The mode of each layer that converting wrote into the file; empty when it did not.
std::vector<std::string> stored_modes(const GgufFile& file, int n_layers) {
    constexpr const char* kKey = "slimrt.cache.modes";
    const auto it = file.metadata().find(kKey);
    if (it == file.metadata().end()) return {};
    std::vector<std::string> names;
    const auto* array = std::get_if<GgufArray>(&it->second);
    if (array)
        for (const GgufValue& mode : elements(*array))
            if (const auto* name = std::get_if<std::string_view>(&mode)) names.emplace_back(*name);
    if (names.size() != size_t(n_layers) || names.size() != array->count)
        fail(ErrorCode::format, file.path(), ": key '", kKey, "' is not an array of ", n_layers, " names");
    return names;
}

/// One mode name a layer, from the options or the file.
std::vector<std::string> resolve_modes(const GgufFile& file, const ModelConfig& c, const CacheOptions& o) {
    std::vector<std::string> names = o.layer_modes;
    if (names.empty() && o.mode == "auto") names = stored_modes(file, c.n_layers);
    if (names.empty()) return std::vector<std::string>(c.n_layers, o.mode == "auto" ? "kv" : o.mode);
    if (int(names.size()) != c.n_layers)
        fail(ErrorCode::argument, names.size(), " cache modes were given for ", c.n_layers,
             " layers: give one name for all, or a list with one a layer");
    return names;
}

void set_sparse_threshold(const CacheMode& mode, float threshold, AttnConfig& c) {
    if (!(threshold >= 0 && threshold < 1))
        fail(ErrorCode::argument, "sparse_threshold must be at least 0 and below 1, got ", threshold);
    if (threshold > 0 && !mode.has_values_alone())
        fail(ErrorCode::cache_unsupported, "sparse_threshold skips rows of V, which cache mode '",
             mode.name(), "' of layer ", c.layer,
             " does not keep apart: use cache mode kv, or sparse_threshold 0");
    c.sparse_threshold = threshold;
}

int64_t resolve_n_ctx(const ModelConfig& c, int64_t n_ctx) {
    constexpr int64_t kUsual = 4096;
    if (n_ctx == 0) return std::min(c.n_ctx_train, kUsual);
    const bool learned = c.architecture->positions == Positions::learned;
    if (n_ctx < 0 || n_ctx > (1 << 30) || (learned && n_ctx > c.n_ctx_train))
        fail(ErrorCode::argument, "n_ctx ", n_ctx, " is not possible: the model has positions for ",
             c.n_ctx_train);
    return n_ctx;
}

}  // namespace

Decoder::Decoder(const GgufFile& file, const CacheOptions& options, Backend& backend,
                 const ExtraTensors& extra)
    : backend_(backend), config_(read_config(file)), options_(options) {
    if (options.n_seqs < 1 || options.n_batch < 1)
        fail(ErrorCode::argument, "n_seqs and n_batch must be at least 1");
    options_.n_ctx = resolve_n_ctx(config_, options.n_ctx);
    options_.layer_modes = resolve_modes(file, config_, options);
    std::vector<Format> formats;
    for (int layer = 0; layer < config_.n_layers; ++layer) {
        attn_.push_back(attention_config(config_, layer, options.type_k, options.type_v));
        modes_.push_back(&require_cache_mode(options_.layer_modes[layer], attn_.back()));
        set_sparse_threshold(*modes_.back(), options.sparse_threshold, attn_.back());
        formats.push_back(modes_.back()->format(attn_.back()));
    }
    weights_ = load_weights(file, config_, backend, modes_, attn_, extra);
    if (config_.architecture->positions != Positions::learned) {
        const int n_rot = config_.rope.n_rot;
        rope_buffer_ =
            backend.alloc(MemoryKind::derived, options_.n_ctx * n_rot * sizeof(float), "RoPE table");
        rope_ = {Tensor(rope_buffer_.data.get(), DType::F32, options_.n_ctx, n_rot), n_rot,
                 config_.architecture->positions == Positions::rope_interleaved};
        const RopeFrequencies frequencies = rope_frequencies(config_, file, options_.n_ctx);
        if (!backend.dry())
            backend.upload(rope_.table, frequencies.table(options_.n_ctx).data(), rope_.table.bytes());
    }
    cache_ = std::make_unique<KvCache>(backend, std::move(formats), options_.n_ctx, options_.n_seqs);
}

std::vector<std::pair<std::string, std::string>> cache_refusals(const ModelConfig& config) {
    std::vector<std::pair<std::string, std::string>> out;
    for (const CacheMode* mode : cache_modes()) {
        std::string reason = mode->refusal(attention_config(config, 0, DType::F16, DType::F16));
        if (!reason.empty()) reason = "layer 0: " + reason;
        out.emplace_back(mode->name(), reason);
    }
    return out;
}

}  // namespace slimrt
