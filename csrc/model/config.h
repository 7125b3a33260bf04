// Sizes of one model, read from GGUF metadata and range-checked.
#pragma once

#include <string>
#include <vector>

#include "core/gguf.h"
#include "kernels/backend.h"

namespace slimrt {

struct Architecture;

enum class RopeScaling { none, linear, yarn, longrope };

struct RopeConfig {
    RopeScaling scaling = RopeScaling::none;
    int n_rot = 0;
    double base = 10000, factor = 1;
    int64_t n_ctx_orig = 0;  // context before scaling (yarn, longrope)
    double attn_factor = 0;  // 0: by the scaling's own formula
    double beta_fast = 32, beta_slow = 1;
    bool pair_factors = true;  // frequencies are divided by a tensor's factors, where there is one
};

/// What may differ from layer to layer.
struct LayerConfig {
    int64_t window = 0;  // 0: none
    int rope = 0;        // index in ModelConfig::ropes, or -1: no position encoding (NoPE)
    int n_kv_heads = 0, head_dim = 0;
    bool v_is_k = false;  // V is K before its norm and RoPE
    int d_ff = 0;
    int owner = 0;  // the layer whose rows this one reads: itself, or one before it
};

struct ModelConfig {
    std::string name;  // general.name, or the file's
    const Architecture* architecture = nullptr;
    int n_layers = 0;  // of the decoder; 0: the encoder is all
    int d_model = 0, d_ff = 0, n_vocab = 0;
    int n_heads = 0;
    int n_kv_heads = 0, head_dim = 0;  // of the first layer; with an encoder, of all
    /// MLA: widths of K's and V's latent, of q's (or 0), of V's heads.
    int latent = 0, q_latent = 0, value_dim = 0;
    float latent_eps = 0;  // of the norms of latents
    int n_mtp_layers = 0;  // multi-token prediction (MTP): layers after the others, which do not run
    int64_t n_ctx_train = 0;
    bool parallel_residual = false;
    float embedding_scale = 1, residual_scale = 1;  // of the embedding; of what attention and FFN add
    float score_scale = 1, output_scale = 1;        // of scores; of the head's input
    float clamp_kqv = 0;                            // 0: none, else q, k and v are clamped to it
    double temperature_scale = 0;  // s: q at position p is times 1 + s ln(1 + floor(p / temperature_length))
    int64_t temperature_length = 1;
    float score_cap = 0, logit_cap = 0;  // 0: none, else a score or logit s is cap * tanh(s / cap)
    bool sinks = false;                  // layers have attn_sinks
    float alibi_bias = 8;                // with ALiBi: the last head's slope is 2^-alibi_bias
    float norm_eps = 0;
    Activation activation = Activation::silu;
    std::vector<RopeConfig> ropes;    // that layers refer to; empty without RoPE
    std::vector<LayerConfig> layers;  // of the decoder; without one a single one, as the encoder's are
    int d_layer_embd = 0;             // width of per-layer embeddings; 0: none
    // With experts.
    int n_experts = 0, n_experts_used = 0;
    int d_ff_expert = 0, d_ff_shared = 0;  // d_ff_shared: of the shared expert, or 0
    Router router;
    // With an encoder. Its layers are as wide as the decoder's.
    int n_encoder_layers = 0;
    int n_inputs = 0;            // width of its input: mel bins, 1 for samples, 0 for token ids
    int64_t n_source_train = 0;  // most rows of its output
    int relative_buckets = 0, relative_distance = 0;
    int decoder_start = 0;
};

/// Throws Error{unsupported} for an unknown architecture, Error{format} for a size that is missing or out of
/// range.
ModelConfig read_config(const GgufFile& file);

/// Sizes of experts and the router's rule. Throws Error{unsupported} for an architecture without experts or
/// an unknown rule, Error{format} for sizes that contradict each other. Defined in experts.cpp.
void read_experts(const GgufFile& file, const std::string& prefix, ModelConfig& config);

/// Scales of embedding, residuals, scores and logits, where the file has them: keys embedding_scale,
/// residual_scale, attention.scale and logit_scale, a divisor of logits. Throws Error{format} for one that is
/// not positive.
void read_scales(const GgufFile& file, const std::string& prefix, ModelConfig& config);

/// The temperature of attention by position (Llama 4): attention.temperature_scale, else `usual`, and
/// temperature_length, else RoPE's n_ctx_orig.
void read_temperature(const GgufFile& file, const std::string& prefix, double usual, ModelConfig& config);

/// Fills c.layers, but for RoPE. Throws Error{format} for values out of range, Error{unsupported} for a
/// window that the architecture does not use and for a layer without KV heads.
void read_layers(const GgufFile& file, const std::string& prefix, ModelConfig& config);

/// Gives each layer its RoPE; rope: that of layers without a window. Throws Error{format} for an invalid RoPE
/// of layers with a window, Error{unsupported} where the architecture has none of its own for them.
void choose_ropes(const GgufFile& file, const std::string& prefix, const RopeConfig& rope,
                  ModelConfig& config);

/// Radians per position of each rotated pair, and the factors of cos and sin.
struct RopeFrequencies {
    std::vector<double> pairs;
    double magnitude = 1;
    double temperature_scale = 0;  // of the magnitude by position, for q: see ModelConfig
    int64_t temperature_length = 1;
    int unrotated = 0;  // this many pairs before these do not rotate

    /// Rows of a cos/sin table (kernels/backend.h: Rope), of positions from `first` on: [n, 2 * all pairs].
    std::vector<float> table(int64_t first, int64_t n) const;
};

/// Frequencies of one of config.ropes with its scaling: linear, llama3 (tensor rope_freqs), YaRN, longrope
/// (short or long factors by n_ctx). Throws Error{format} where the tensor of factors is missing or
/// misshapen, or an angle is not finite.
RopeFrequencies rope_frequencies(const ModelConfig& config, const RopeConfig& rope, const GgufFile& file,
                                 int64_t n_ctx);

}  // namespace slimrt
