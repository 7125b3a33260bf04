#include "model/layer.h"

#include "model/ffn.h"

namespace slimrt {

Tensor norm(Backend& backend, const ModelConfig& config, const Norm& w, Tensor x, Tensor out) {
    if (!w.present) return x;
    backend.norm(config.architecture->norm, x, w.weight, w.bias, config.norm_eps, out);
    return out;
}

void add_positions(Backend& backend, const ModelConfig& config, Tensor table, const Norm& w, Tensor positions,
                   Scratch& scratch, Tensor x) {
    if (table) {
        const Scratch::Scope scope(scratch);
        const Tensor p = scratch.f32(x.rows, x.cols);
        backend.gather(table, positions, p);
        backend.add(x, p);
    }
    norm(backend, config, w, x, x);
}

void feed_forward(Backend& backend, const ModelConfig& config, const LayerWeights& w, Scratch& scratch,
                  Tensor x, Tensor out) {
    const Scratch::Scope scope(scratch);
    const Tensor in = norm(backend, config, w.ffn_norm, x, out);
    config.architecture->ffn->run(backend, config, w, scratch, x, in, out);
    norm(backend, config, w.ffn_post_norm, out, out);
}

}  // namespace slimrt
