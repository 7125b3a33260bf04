#include "model/ffn.h"

#include "model/layer.h"

namespace slimrt {
namespace {

void load(TensorSource& file, const ModelConfig& c, const std::string& p, LayerWeights& l) {
    const Architecture& arch = *c.architecture;
    if (arch.fused_gate_up) {
        const Tensor both =
            file.matrix(p + "ffn_up.weight", 2 * int64_t(l.d_ff), c.d_model, Presence::required, l.d_ff);
        l.gate = both.rows_of(0, l.d_ff);
        l.up = both.rows_of(l.d_ff, l.d_ff);
    } else {
        l.up = file.matrix(p + "ffn_up.weight", l.d_ff, c.d_model);
        l.up_bias = file.vector(p + "ffn_up.bias", l.d_ff, arch.linear_bias);
        l.gate = file.matrix(p + "ffn_gate.weight", l.d_ff, c.d_model, arch.gated_ffn);
        if (l.gate) l.gate_bias = file.vector(p + "ffn_gate.bias", l.d_ff, arch.linear_bias);
    }
    l.down = file.matrix(p + "ffn_down.weight", c.d_model, l.d_ff);
    l.down_bias = file.vector(p + "ffn_down.bias", c.d_model, arch.linear_bias);
}

/// out = W_down act(W_up x), or W_down (act(W_gate x) * W_up x) where there is a gate.
void run(Backend& backend, const ModelConfig& config, const LayerWeights& w, Scratch& scratch, Tensor,
         Tensor x, Tensor out) {
    const Tensor up = scratch.f32(x.rows, w.up.rows);
    Tensor inner = up;
    if (w.gate) {
        inner = scratch.f32(x.rows, w.up.rows);
        const Product products[] = {{w.up, w.up_bias, up}, {w.gate, w.gate_bias, inner}};
        backend.linear(x, products);
        backend.gate(config.activation, inner, up);
    } else {
        backend.linear(x, w.up, w.up_bias, up);
        backend.activate(config.architecture->ungated_activation.value_or(config.activation), up);
    }
    norm(backend, config, w.ffn_sub_norm, inner, inner);
    backend.linear(inner, w.down, w.down_bias, out);
}

}  // namespace

const Ffn dense_ffn = {load, run};

}  // namespace slimrt
