// Gemma 4 (text): as Gemma 3, but with norms as they are stored, scores that are not scaled since q and k are
// normed, V normed too, and a scale of each layer's output. Layers without a window have wider heads, of
// which some pairs do not rotate (rope_freqs), and in the larger models no W_V. Experts are beside a dense
// network, with norms of their own.
#include <cmath>

#include "core/error.h"
#include "model/arch/arch.h"
#include "model/config.h"
#include "model/ffn.h"
#include "model/layer.h"

namespace slimrt {
namespace {

void configure(const GgufFile& file, const std::string& prefix, ModelConfig& c) {
    c.embedding_scale = std::sqrt(float(c.d_model));
    c.d_layer_embd = int(file.integer(prefix + "embedding_length_per_layer_input", 0, 1 << 16, 0));
    const int own =
        c.n_layers - int(file.integer(prefix + "attention.shared_kv_layers", 0, c.n_layers - 1, 0));
    for (int i = own; i < c.n_layers; ++i) {
        int& owner = c.layers[i].owner = own - 1;
        while (owner >= 0 && !c.layers[owner].window != !c.layers[i].window) --owner;
        if (owner < 0)
            fail(ErrorCode::format, file.path(), ": ", prefix, "attention.shared_kv_layers leaves layer ", i,
                 " no layer of its kind to read K and V of");
    }
}

void load(TensorSource& file, const ModelConfig& c, const std::string& p, LayerWeights& l) {
    dense_ffn.load(file, c, p, l);
    ExpertWeights& w = l.experts;
    load_experts(file, c, p, w);
    if (!w.router) return;
    const auto norm = [&](const char* name) {
        return Norm{file.vector(p + name, c.d_model, Presence::required), {}, true};
    };
    w.router_norm = norm("ffn_gate_inp.scale");
    w.norm = norm("pre_ffw_norm_2.weight");
    w.post_norm = norm("post_ffw_norm_2.weight");
    w.dense_post_norm = norm("post_ffw_norm_1.weight");
}

/// norm(dense(x)) + norm(experts(norm(state))); the router reads norm(state) times d_model^-1/2.
void run(Backend& backend, const ModelConfig& c, const LayerWeights& l, Scratch& scratch, Tensor state,
         Tensor x, Tensor out) {
    dense_ffn.run(backend, c, l, scratch, state, x, out);
    const ExpertWeights& w = l.experts;
    if (!w.router) return;
    norm(backend, c, w.dense_post_norm, out, out);
    const Tensor routed = scratch.f32(x.rows, x.cols), other = scratch.f32(x.rows, x.cols);
    norm(backend, c, w.router_norm, state, routed);
    backend.scale(routed, 1 / std::sqrt(float(c.d_model)));
    norm(backend, c, w.norm, state, other);
    run_experts(backend, c, w, scratch, routed, other, other);
    norm(backend, c, w.post_norm, other, other);
    backend.add(out, other);
}

const Ffn dense_and_experts = {load, run};

}  // namespace

const Architecture gemma4 = {
    .name = "gemma4",
    .norms = Norms::both,
    .layer_scale = Presence::optional,
    .positions = Positions::rope_neox,
    .qk_norm = QkNorm::head,
    .v_norm = true,
    .k_for_v = true,
    .scaled_scores = false,
    .ffn = &dense_and_experts,
    .activation = Activation::gelu_tanh,
    .router = {.renormalised = true},
    .sliding_window = true,
    .layers = {.full_period = 6, .window_rope = WindowRope::own, .window_base = 10000},
    .configure = configure,
};

}  // namespace slimrt
