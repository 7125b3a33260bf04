#include "model/layer.h"

#include "model/architecture.h"

namespace slimrt {

Tensor norm(Backend& backend, const ModelConfig& config, const Norm& w, Tensor x, Tensor out) {
    if (!w.weight) return x;
    backend.norm(config.architecture->norm, x, w.weight, w.bias, config.norm_eps, out);
    return out;
}

void feed_forward(Backend& backend, const ModelConfig& config, const LayerWeights& w, Scratch& scratch,
                  Tensor x, Tensor out) {
    const Scratch::Scope scope(scratch);
    const Tensor in = norm(backend, config, w.ffn_norm, x, out);
    const Tensor up = scratch.f32(x.rows, config.d_ff);
    Tensor inner = up;
    if (w.gate) {
        inner = scratch.f32(x.rows, config.d_ff);
        const Product products[] = {{w.up, w.up_bias, up}, {w.gate, w.gate_bias, inner}};
        backend.linear(in, products);
        backend.gate(config.activation, inner, up);
    } else {
        backend.linear(in, w.up, w.up_bias, up);
        backend.activate(config.architecture->ungated_activation.value_or(config.activation), up);
    }
    backend.linear(inner, w.down, w.down_bias, out);
    norm(backend, config, w.ffn_post_norm, out, out);
}

}  // namespace slimrt
