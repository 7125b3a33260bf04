#include "model/encoder.h"

#include <algorithm>
#include <numeric>

#include "cache/attend.h"
#include "model/architecture.h"

namespace slimrt {

int64_t Encoder::rows_of(int64_t n) const {
    for (const Convolution& c : config_.architecture->convolutions) {
        n += 2 * c.padding - c.width;
        if (n < 0) return 0;
        n = n / c.stride + 1;
    }
    return n;
}

int64_t Encoder::inputs_of(int64_t n) const {
    const auto& convolutions = config_.architecture->convolutions;
    for (auto c = convolutions.rbegin(); c != convolutions.rend(); ++c)
        n = n * c->stride - 1 + c->width - 2 * c->padding;
    return n;
}

void Encoder::embed(Tensor ids, Tensor x) const {
    backend_.gather(weights_.token_embd, ids, x);
    if (config_.embedding_scale != 1) backend_.scale(x, config_.embedding_scale);
}

// A convolution is a product of its weight with unfolded windows (im2col).
void Encoder::convolve(Tensor input, Scratch& scratch, Tensor x) const {
    const Scratch::Scope scope(scratch);
    const auto& convolutions = config_.architecture->convolutions;
    for (size_t i = 0; i < convolutions.size(); ++i) {
        const Convolution& c = convolutions[i];
        const ConvolutionWeights& w = weights_.encoder.convolutions[i];
        const int64_t n = (input.rows + 2 * c.padding - c.width) / c.stride + 1;
        const Tensor out = i + 1 == convolutions.size() ? x : scratch.f32(n, w.weight.rows);
        for (int64_t first = 0; first < n; first += n_batch_) {
            const Scratch::Scope of_batch(scratch);
            const Tensor to = out.rows_of(first, std::min(n_batch_, n - first));
            const Tensor windows = scratch.f32(to.rows, w.weight.cols);
            backend_.unfold(input, c.stride, c.padding - first * c.stride, windows);
            backend_.linear(windows, w.weight, w.bias, to);
        }
        backend_.activate(c.activation, out);
        if (w.norm.weight) {
            const Tensor whole(out.data, out.dtype, 1, out.rows * out.cols);
            constexpr float kEps = 1e-5f;
            backend_.norm(NormKind::layer, whole, {}, {}, kEps, whole);
            backend_.multiply(out, w.norm.weight);
            backend_.add(out, w.norm.bias);
        }
        input = out;
    }
}

namespace {

/// Rows of an input at consecutive positions.
struct Run {
    int64_t first, n, position;
};

/// apart: rows with a gap between them are in different runs.
std::vector<Run> runs_of(int64_t first, std::span<const int32_t> positions, bool apart) {
    std::vector<Run> runs;
    for (size_t i = 0; i < positions.size(); ++i) {
        if (i == 0 || (apart && positions[i] != positions[i - 1] + 1))
            runs.push_back({first + int64_t(i), 0, positions[i]});
        ++runs.back().n;
    }
    return runs;
}

/// Lengths of the series in inputs of these lengths.
std::vector<int64_t> series_of(std::span<const int64_t> lengths, std::span<const int32_t> positions) {
    std::vector<int64_t> series;
    int64_t at = 0;
    for (const int64_t n : lengths) {
        for (int64_t i = at; i < at + n; ++i) {
            if (i == at || positions[i] <= positions[i - 1]) series.push_back(0);
            ++series.back();
        }
        at += n;
    }
    return series;
}

}  // namespace

// Bidirectional attention. A call takes consecutive rows for consecutive positions, which holds within a run
// only. So call i attends to run i of each input, and each run of queries is placed at its distance from it.
// Where scores do not depend on distances, an input is one run.
Encoder::Calls Encoder::calls_of(std::span<const int64_t> lengths, std::span<const int32_t> positions) const {
    const bool relative = config_.architecture->positions == Positions::relative;
    Calls calls;
    int64_t first = 0;
    for (const int64_t n : lengths) {
        const std::vector<Run> runs = runs_of(first, positions.subspan(first, n), relative);
        calls.resize(std::max(calls.size(), runs.size()));
        for (size_t i = 0; i < runs.size(); ++i) {
            const Run& seen = runs[i];
            for (const Run& run : runs)
                calls[i].push_back({.query = int(run.first),
                                    .n_queries = int(run.n),
                                    .position = seen.first + run.position - seen.position,
                                    .begin = seen.first,
                                    .end = seen.first + seen.n,
                                    .fresh = false,
                                    .causal = false});
        }
        first += n;
    }
    return calls;
}

// A plan is of the most that attention may take: all rows are series of one instant.
Encoder::Instants Encoder::instants_of(std::span<const int64_t> lengths, std::span<const int32_t> positions,
                                       Scratch& scratch) const {
    const int64_t n_rows = int64_t(positions.size());
    Instants instants{scratch.i32(n_rows), scratch.i32(n_rows), Calls(1)};
    auto& calls = instants.calls[0];
    const auto start = [&calls](int64_t at) {
        calls.push_back(
            {.query = int(at), .position = at, .begin = at, .end = at, .fresh = false, .causal = false});
    };
    if (backend_.dry()) {
        start(0);
        calls[0].n_queries = int(n_rows), calls[0].end = n_rows;
        return instants;
    }
    std::vector<int32_t> order(n_rows), places(n_rows);
    std::iota(order.begin(), order.end(), 0);
    int64_t first = 0;
    for (const int64_t n : lengths) {
        std::stable_sort(order.begin() + first, order.begin() + first + n,
                         [&](int32_t a, int32_t b) { return positions[a] < positions[b]; });
        for (int64_t i = first; i < first + n; ++i) {
            places[order[i]] = int32_t(i);
            if (i == first || positions[order[i]] != positions[order[i - 1]]) start(i);
            ++calls.back().n_queries, ++calls.back().end;
        }
        first += n;
    }
    instants.alone = int64_t(calls.size()) == n_rows;
    backend_.upload(instants.order, order.data(), order.size() * sizeof(int32_t));
    backend_.upload(instants.places, places.data(), places.size() * sizeof(int32_t));
    return instants;
}

// x = norm(x + positions); in each layer x += attention(norm(x)), of series x += group_attention(norm(x)),
// x += ffn(norm(x)), where each sum may be normed; at the end norm(x). Without the norms that a model does
// not have.
void Encoder::forward(std::span<const int64_t> lengths, std::span<const int32_t> positions, Scratch& scratch,
                      Tensor x, const Progress& progress) const {
    const Scratch::Scope scope(scratch);
    const bool grouped = config_.architecture->encoder == EncoderKind::series;
    const Calls calls = calls_of(grouped ? series_of(lengths, positions) : lengths, positions);
    const Tensor at = scratch.i32(x.rows);
    backend_.upload(at, positions.data(), positions.size() * sizeof(int32_t));
    const EncoderWeights& w = weights_.encoder;
    add_positions(backend_, config_, w.position_embd, w.embd_norm, at, scratch, x);
    const Instants instants = grouped ? instants_of(lengths, positions, scratch) : Instants{};
    const auto& layers = w.layers;
    for (size_t layer = 0; layer < layers.size(); ++layer) {
        if (progress) progress(double(layer) / double(layers.size()));
        attention(layers[layer].attn_norm, layers[layer].attn, calls, at, scratch, x);
        norm(backend_, config_, layers[layer].attn_sum_norm, x, x);
        if (grouped) group_attention(layers[layer], instants, scratch, x);
        for (int64_t i = 0; i < x.rows; i += n_batch_) {
            const Scratch::Scope of_batch(scratch);
            const Tensor some = x.rows_of(i, std::min(n_batch_, x.rows - i));
            const Tensor out = scratch.f32(some.rows, x.cols);
            feed_forward(backend_, config_, layers[layer], scratch, some, out);
            backend_.add(some, out);
            norm(backend_, config_, layers[layer].ffn_sum_norm, some, some);
        }
    }
    norm(backend_, config_, w.output_norm, x, x);
}

// As attention(), among the rows of an instant, which are brought together for it.
void Encoder::group_attention(const LayerWeights& w, const Instants& instants, Scratch& scratch,
                              Tensor x) const {
    if (instants.alone && config_.n_kv_heads == config_.n_heads)
        return attention_alone(w.group_norm, w.group, scratch, x);
    const Scratch::Scope scope(scratch);
    const Tensor together = scratch.f32(x.rows, x.cols);
    backend_.gather(x, instants.order, together);
    attention(w.group_norm, w.group, instants.calls, {}, scratch, together);
    backend_.gather(together, instants.places, x);
}

// As attention(), where each row attends to itself alone: softmax over it is 1, whatever q and k are.
void Encoder::attention_alone(const Norm& in_norm, const AttnWeights& w, Scratch& scratch, Tensor x) const {
    const Scratch::Scope scope(scratch);
    const Tensor out = scratch.f32(x.rows, x.cols), v = scratch.f32(x.rows, w.v.rows);
    backend_.linear(norm(backend_, config_, in_norm, x, out), w.v, w.v_bias, v);
    backend_.linear(v, w.o, w.o_bias, out);
    backend_.add(x, out);
}

// x += attention(norm(x)). positions: none without RoPE.
void Encoder::attention(const Norm& in_norm, const AttnWeights& w, const Calls& calls, Tensor positions,
                        Scratch& scratch, Tensor x) const {
    const Scratch::Scope scope(scratch);
    const AttnConfig c = attention_config(config_, 0);
    const Tensor out = scratch.f32(x.rows, x.cols);
    const Tensor in = norm(backend_, config_, in_norm, x, out);
    const auto qkv = project(backend_, scratch, in, {{w.q, w.q_bias}, {w.k, w.k_bias}, {w.v, w.v_bias}});
    if (rope_ && positions) {
        backend_.rope(qkv[0], c.n_heads, rope_, positions);
        backend_.rope(qkv[1], c.n_kv_heads, rope_, positions);
    }
    const Tensor heads = scratch.f32(x.rows, c.q_width());
    const ScoreTerm scores[] = {{dense_rows(qkv[1], 0), {}, c.n_kv_heads, c.head_dim, qkv[0]}};
    const ValueTerm values[] = {{dense_rows(qkv[2], 0), {}, c.n_kv_heads, c.head_dim, heads}};
    AttentionArgs args{.scores = scores,
                       .values = values,
                       .n_heads = c.n_heads,
                       .scale = c.scale,
                       .relative_bias = w.relative_bias,
                       .relative_origin = (w.relative_bias.cols - 1) / 2};
    if (args.relative_bias)
        args.lse = scratch.f32(x.rows, c.n_heads);  // always, so that the plan holds for inputs with gaps
    for (const auto& sequences : calls) {
        args.sequences = sequences;
        backend_.attention(args);
        args.merge = true;
    }
    backend_.linear(heads, w.o, w.o_bias, out);
    backend_.add(x, out);
}

}  // namespace slimrt
