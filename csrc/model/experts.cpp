// Mixture of experts: a router chooses experts for each token (Shazeer et al., 2017; Jiang et al., "Mixtral
// of Experts"), beside which shared experts may take every token (Dai et al., "DeepSeekMoE").
#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "model/ffn.h"

namespace slimrt {
namespace {

constexpr const char* kChoiceBias = "exp_probs_b.bias";

/// The first tensor by which a router chooses experts otherwise than it weighs them; "" without one.
std::string choice_bias(const GgufFile& file) {
    for (const auto& [name, tensor] : file.tensors())
        if (name.ends_with(kChoiceBias)) return name;
    return "";
}

void read_groups(const GgufFile& file, const std::string& prefix, ModelConfig& c) {
    Router& r = c.router;
    r.groups = std::max(1, int(file.integer(prefix + "expert_group_count", 0, kMaxExpertGroups, 1)));
    if (r.groups == 1) return;
    r.groups_used = int(file.integer(prefix + "expert_group_used_count", 1, r.groups));
    const int size = c.n_experts / r.groups;
    if (c.n_experts % r.groups || (r.sigmoid && size < 2))
        fail(ErrorCode::format, file.path(), ": ", prefix, "expert_group_count ", r.groups,
             " does not divide ", c.n_experts, " experts into groups", r.sigmoid ? " of two or more" : "");
    if (c.n_experts_used > size * r.groups_used)
        fail(ErrorCode::format, file.path(), ": ", prefix, "expert_used_count ", c.n_experts_used,
             " is more than the ", size * r.groups_used, " of ", prefix, "expert_group_used_count ",
             r.groups_used);
}

void read_router(const GgufFile& file, const std::string& prefix, ModelConfig& c) {
    enum Function { usual, softmax, sigmoid, softmax_of_taken };
    Router& r = c.router = c.architecture->router;
    const std::string key = prefix + "expert_gating_func";
    const int64_t function = file.integer(key, usual, 1 << 16, usual);
    if (function > softmax_of_taken)
        fail(ErrorCode::unsupported, file.path(), ": ", key, " ", function,
             " is not supported; supported are: 1 (softmax), 2 (sigmoid), 3 (softmax of those that are "
             "taken)");
    // GLM-4.7-Flash's files lack the key; of the families here only routers by sigmoids have the bias.
    const std::string biased = choice_bias(file);
    r.sigmoid = function == usual ? r.sigmoid || !biased.empty() : function == sigmoid;
    r.renormalised = file.boolean(prefix + "expert_weights_norm", r.renormalised);
    if (function == softmax_of_taken) {
        r.renormalised = true;  // the same, since without a choice bias nothing else reads the probabilities
        if (!biased.empty())
            fail(ErrorCode::unsupported, file.path(), ": tensor '", biased, "' beside ", key,
                 " 3 is not supported");
    }
    r.scale = float(file.number(prefix + "expert_weights_scale", r.scale));
    if (!(r.scale > 0) || !std::isfinite(r.scale))
        fail(ErrorCode::format, file.path(), ": ", prefix, "expert_weights_scale is ", r.scale,
             ", not a positive number");
    read_groups(file, prefix, c);
}

void load(TensorSource& file, const ModelConfig& c, const std::string& p, LayerWeights& l) {
    ExpertWeights& w = l.experts;
    load_experts(file, c, p, w);
    if (!w.router) return dense_ffn.load(file, c, p, l);
    const int64_t d = c.d_model, shared = c.d_ff_shared;
    if (!shared) return;
    w.shared_gate = file.matrix(p + "ffn_gate_shexp.weight", shared, d);
    w.shared_up = file.matrix(p + "ffn_up_shexp.weight", shared, d);
    w.shared_down = file.matrix(p + "ffn_down_shexp.weight", d, shared);
    w.shared_weight = file.vector(p + "ffn_gate_inp_shexp.weight", d, Presence::optional);
}

/// out = the shared expert's result for x, by its gate where it has one.
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

void run(Backend& backend, const ModelConfig& c, const LayerWeights& l, Scratch& scratch, Tensor state,
         Tensor x, Tensor out) {
    const ExpertWeights& w = l.experts;
    if (!w.router) return dense_ffn.run(backend, c, l, scratch, state, x, out);
    Tensor shared;
    if (w.shared_gate) {
        shared = scratch.f32(x.rows, x.cols);
        run_shared(backend, c, w, scratch, x, shared);
    }
    run_experts(backend, c, w, scratch, x, x, out);
    if (shared) backend.add(out, shared);
}

}  // namespace

void load_experts(TensorSource& file, const ModelConfig& c, const std::string& p, ExpertWeights& w) {
    const int64_t n = c.n_experts, d = c.d_model, inner = c.d_ff_expert;
    if (n) w.router = file.matrix(p + "ffn_gate_inp.weight", n, d, Presence::optional);
    if (!w.router) return;
    const Presence biased = c.architecture->linear_bias;
    w.router_bias = file.vector(p + "ffn_gate_inp.bias", n, biased);
    const bool needed = c.architecture->router.sigmoid;
    w.choice_bias = file.vector(p + kChoiceBias, n, needed ? Presence::required : Presence::optional);
    w.experts = {
        .n = int(n),
        .gate = file.matrix(p + "ffn_gate_up_exps.weight", n * 2 * inner, d, Presence::optional, inner),
        .down = file.matrix(p + "ffn_down_exps.weight", n * d, inner, Presence::required, d),
        .gate_bias = file.vectors(p + "ffn_gate_exps.bias", n, inner, biased),
        .up_bias = file.vectors(p + "ffn_up_exps.bias", n, inner, biased),
        .down_bias = file.vectors(p + "ffn_down_exps.bias", n, d, biased),
        .scale = file.vector(p + "ffn_down_exps.scale", n, Presence::optional)};
    if (w.experts.gate) return;
    w.experts.gate = file.matrix(p + "ffn_gate_exps.weight", n * inner, d, Presence::required, inner);
    w.experts.up = file.matrix(p + "ffn_up_exps.weight", n * inner, d, Presence::required, inner);
}

void run_experts(Backend& backend, const ModelConfig& c, const ExpertWeights& w, Scratch& scratch,
                 Tensor routed, Tensor x, Tensor out) {
    const Tensor scores = scratch.f32(x.rows, c.n_experts), shares = scratch.f32(x.rows, c.n_experts_used);
    const Tensor ids = scratch.take(DType::I32, x.rows, c.n_experts_used);
    backend.linear(routed, w.router, w.router_bias, scores);
    backend.route(c.router, scores, w.choice_bias, ids, shares);
    backend.experts(c.activation, w.experts, x, ids, shares, out);
}

const Ffn expert_ffn = {load, run};

void read_experts(const GgufFile& file, const std::string& prefix, ModelConfig& c) {
    c.n_experts = int(file.integer(prefix + "expert_count", 0, kMaxExperts, 0));
    if (c.n_experts == 0) return;
    if (c.architecture->ffn == &dense_ffn)
        fail(ErrorCode::unsupported, file.path(), ": experts (", prefix, "expert_count ", c.n_experts,
             ") are not supported in architecture '", c.architecture->name, "'");
    c.n_experts_used = int(file.integer(prefix + "expert_used_count", 1, c.n_experts));
    c.d_ff_expert = int(file.integer(prefix + "expert_feed_forward_length", 1, 1 << 24, c.d_ff));
    const int64_t shared = file.integer(prefix + "expert_shared_count", 0, 1 << 10, 0) * c.d_ff_expert;
    if (shared > 1 << 24)
        fail(ErrorCode::format, file.path(), ": ", prefix, "expert_shared_count makes a network of ", shared,
             " columns");
    c.d_ff_shared = int(file.integer(prefix + "expert_shared_feed_forward_length", 0, 1 << 24, shared));
    read_router(file, prefix, c);
}

}  // namespace slimrt
