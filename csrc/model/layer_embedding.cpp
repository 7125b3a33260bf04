#include "model/layer_embedding.h"

#include <cmath>

#include "core/error.h"
#include "model/ffn.h"
#include "model/layer.h"

namespace slimrt {

void load_layer_embeddings(TensorSource& file, const ModelConfig& c, Weights& w) {
    const int64_t width = c.d_layer_embd, all = width * c.n_layers;
    if (!width) return;
    w.layer_embd =  // part 1: rows that are read by columns cannot be interleaved
        file.matrix("per_layer_token_embd.weight", c.n_vocab, all, Presence::required, 1);
    w.layer_embd_proj = file.matrix("per_layer_model_proj.weight", all, c.d_model, Presence::required, width);
    w.layer_embd_norm = {file.vector("per_layer_proj_norm.weight", width, Presence::required), {}, true};
    const DTypeInfo& type = dtype_info(w.layer_embd.dtype);
    if (width % type.block)
        fail(ErrorCode::unsupported, "tensor 'per_layer_token_embd.weight': a layer's ", width,
             " columns are no whole blocks of type ", type.name,
             ": convert the model again, to another type");
}

void load_layer_embedding(TensorSource& file, const ModelConfig& c, const std::string& p, LayerWeights& w) {
    const int64_t width = c.d_layer_embd;
    if (!width) return;
    w.embd_gate = file.matrix(p + "inp_gate.weight", width, c.d_model);
    w.embd_proj = file.matrix(p + "proj.weight", c.d_model, width);
    w.embd_post_norm = {file.vector(p + "post_norm.weight", c.d_model, Presence::required), {}, true};
}

void add_layer_embedding(Backend& backend, const ModelConfig& c, const Weights& weights, int layer,
                         Tensor tokens, Tensor first, Scratch& scratch, Tensor x, Tensor out) {
    const Scratch::Scope scope(scratch);
    const LayerWeights& w = weights.layers[layer];
    const int64_t width = c.d_layer_embd, begin = layer * width;
    const Tensor e = scratch.f32(x.rows, width), gate = scratch.f32(x.rows, width);
    backend.linear(first, weights.layer_embd_proj.rows_of(begin, width), {}, e);
    backend.scale(e, 1 / std::sqrt(float(c.d_model)));
    norm(backend, c, weights.layer_embd_norm, e, e);
    backend.gather(weights.layer_embd.cols_of(begin, width), tokens, gate);
    backend.scale(gate, std::sqrt(float(width)));
    backend.add(e, gate);
    backend.scale(e, std::sqrt(0.5f));
    backend.linear(x, w.embd_gate, {}, gate);
    backend.gate(c.activation, gate, e);
    backend.linear(gate, w.embd_proj, {}, out);
    norm(backend, c, w.embd_post_norm, out, out);
    backend.add(x, out);
}

}  // namespace slimrt
