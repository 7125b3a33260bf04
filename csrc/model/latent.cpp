#include "model/latent.h"

#include <algorithm>
#include <numeric>

#include "core/error.h"

namespace slimrt {

void read_latent(const GgufFile& file, const std::string& prefix, ModelConfig& c) {
    const std::string p = prefix + "attention.";
    const auto size = [&](const char* key, int64_t usual) {
        return int(file.integer(p + key, 1, 1 << 16, usual));
    };
    c.latent = int(file.integer(p + "kv_lora_rank", 1, 1 << 16));
    c.q_latent = int(file.integer(p + "q_lora_rank", 0, 1 << 16, 0));
    // Where a file has the _mla keys, the others describe the absorbed form: one KV head whose rows are
    // latents.
    const int usual = std::max(1, c.d_model / c.n_heads);
    const int head_dim = size("key_length_mla", size("key_length", usual));
    c.value_dim = size("value_length_mla", size("value_length", usual));
    for (LayerConfig& layer : c.layers) {
        layer.n_kv_heads = c.n_heads;
        layer.head_dim = head_dim;
    }
    c.latent_eps =
        float(file.number("slimrt.latent_norm_epsilon", file.number(p + "layer_norm_rms_epsilon")));
    if (file.has("slimrt.cache.owners"))
        fail(ErrorCode::unsupported, file.path(),
             ": layers with latent attention (MLA) share no rows (key slimrt.cache.owners)");
    if (c.latent_eps < 0)
        fail(ErrorCode::format, file.path(), ": slimrt.latent_norm_epsilon is negative: ", c.latent_eps);
}

void load_latent(TensorSource& file, const ModelConfig& c, const std::string& prefix, AttnWeights& w) {
    const std::string p = prefix + "attn_";
    const int64_t n = c.n_heads, d = c.d_model, latent = c.latent, rotating = c.ropes[0].n_rot;
    const int64_t plain = c.head_dim - rotating;
    const int64_t q = n * c.head_dim;
    if (c.q_latent) {
        w.q_a = file.matrix(p + "q_a.weight", c.q_latent, d);
        w.q_a_norm = file.vector(p + "q_a_norm.weight", c.q_latent, Presence::required);
    }
    w.q = c.q_latent ? file.matrix(p + "q_b.weight", q, c.q_latent) : file.matrix(p + "q.weight", q, d);
    w.k = file.matrix(p + "kv_a_mqa.weight", latent + rotating, d);
    w.k_norm = file.vector(p + "kv_a_norm.weight", latent, Presence::required);
    w.kv_b = file.matrix(p + "kv_b.weight", n * (plain + c.value_dim), latent, Presence::optional,
                         std::gcd(plain, int64_t(c.value_dim)));
    if (w.kv_b) return;
    w.k_b = file.matrix(p + "k_b.weight", n * latent, plain, Presence::required, latent);
    w.v_b = file.matrix(p + "v_b.weight", n * c.value_dim, latent, Presence::required, c.value_dim);
}

}  // namespace slimrt
