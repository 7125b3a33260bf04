// Layers with experts: a router takes some of them for each token (Shazeer et al., 2017; Jiang et al.,
// "Mixtral of Experts"), and a network that every token takes may stand beside them (Dai et al.,
// "DeepSeekMoE").
#include "model/ffn.h"

namespace slimrt {
namespace {

void load(TensorSource& file, const ModelConfig& c, const std::string& p, LayerWeights& l) {
    ExpertWeights& w = l.experts;
    const int64_t n = c.n_experts, d = c.d_model, inner = c.d_ff_expert, shared = c.d_ff_shared;
    if (n) w.router = file.matrix(p + "ffn_gate_inp.weight", n, d, Presence::optional);
    if (!w.router) return dense_ffn.load(file, c, p, l);
    w.experts = {int(n), file.matrix(p + "ffn_gate_exps.weight", n * inner, d),
                 file.matrix(p + "ffn_up_exps.weight", n * inner, d),
                 file.matrix(p + "ffn_down_exps.weight", n * d, inner)};
    if (!shared) return;
    w.shared_gate = file.matrix(p + "ffn_gate_shexp.weight", shared, d);
    w.shared_up = file.matrix(p + "ffn_up_shexp.weight", shared, d);
    w.shared_down = file.matrix(p + "ffn_down_shexp.weight", d, shared);
    w.shared_weight = file.vector(p + "ffn_gate_inp_shexp.weight", d, Presence::optional);
}

/// out = what every token takes of x.
void run_shared(Backend& backend, const ModelConfig& c, const ExpertWeights& w, Scratch& scratch, Tensor x,
                Tensor out) {
    const Tensor gate = scratch.f32(x.rows, c.d_ff_shared), up = scratch.f32(x.rows, c.d_ff_shared);
    const Product products[] = {{w.shared_gate, {}, gate}, {w.shared_up, {}, up}};
    backend.linear(x, products);
    backend.gate(c.activation, gate, up);
    backend.linear(gate, w.shared_down, {}, out);
    if (!w.shared_weight) return;
    const Tensor share = scratch.f32(x.rows, 1);
    backend.linear(x, w.shared_weight, {}, share);
    backend.gate_heads(out, share);
}

void run(Backend& backend, const ModelConfig& c, const LayerWeights& l, Scratch& scratch, Tensor x,
         Tensor out) {
    const ExpertWeights& w = l.experts;
    if (!w.router) return dense_ffn.run(backend, c, l, scratch, x, out);
    const Tensor scores = scratch.f32(x.rows, c.n_experts), shares = scratch.f32(x.rows, c.n_experts_used);
    const Tensor ids = scratch.take(DType::I32, x.rows, c.n_experts_used);
    backend.linear(x, w.router, {}, scores);
    backend.route(c.router, scores, ids, shares);
    Tensor shared;
    if (w.shared_gate) {
        shared = scratch.f32(x.rows, x.cols);
        run_shared(backend, c, w, scratch, x, shared);
    }
    backend.experts(c.activation, w.experts, x, ids, shares, out);
    if (shared) backend.add(out, shared);
}

}  // namespace

const Ffn expert_ffn = {load, run};

}  // namespace slimrt
