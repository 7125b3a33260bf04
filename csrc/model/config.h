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
    bool pair_factors = true;  // divided by those of a tensor, where there is one
};

/// What a layer does otherwise than its neighbours.
struct LayerConfig {
    int64_t window = 0;  // 0: none
    int rope = 0;        // of ModelConfig::ropes, or -1: its q and k know no positions
    int n_kv_heads = 0, head_dim = 0;
    bool v_is_k = false;  // V is K before its norm and RoPE
    int d_ff = 0;
    int owner = 0;  // whose rows it reads, itself or one before it
};

struct ModelConfig {
    std::string name;  // general.name, or the file's
    const Architecture* architecture = nullptr;
    int n_layers = 0, d_model = 0, d_ff = 0, n_vocab = 0;
    int n_heads = 0;
    int n_kv_heads = 0, head_dim = 0;             // of the first layer, and of all with an encoder
    int latent = 0, q_latent = 0, value_dim = 0;  // with latent attention: widths; of q's own latent, or 0
    float latent_eps = 0;                         // of the norms of latents
    int n_unread_layers = 0;                      // after those that run: they predict tokens after the next
    int64_t n_ctx_train = 0;
    bool parallel_residual = false;
    float embedding_scale = 1, residual_scale = 1;  // of the embedding, of what attention and FFN add
    float score_scale = 1, output_scale = 1;        // of scores, of what the head reads
    float clamp_kqv = 0;                            // 0: none, else q, k and v are clamped to it
    double query_growth = 0;  // g: q of position p are times 1 + g ln(1 + floor(p / query_growth_length))
    int64_t query_growth_length = 1;
    float score_cap = 0, logit_cap = 0;  // 0: none, else a score or logit s is cap * tanh(s / cap)
    bool sinks = false;                  // layers have attn_sinks
    float alibi_bias = 8;                // with ALiBi
    float norm_eps = 0;
    Activation activation = Activation::silu;
    std::vector<RopeConfig> ropes;    // which layers name; none without RoPE
    std::vector<LayerConfig> layers;  // each of the decoder's
    int d_layer_embd = 0;             // width of the embeddings that each layer has of its own; 0: none
    // Of experts, if there are any.
    int n_experts = 0, n_experts_used = 0;
    int d_ff_expert = 0, d_ff_shared = 0;  // shared: of what every token takes besides, or 0
    Router router;
    // With an encoder. Its layers are as wide as the decoder's.
    int n_encoder_layers = 0;
    int n_inputs = 0;            // width of what it reads: mel bins, 1 for samples, 0 for token ids
    int64_t n_source_train = 0;  // rows of its output
    int relative_buckets = 0, relative_distance = 0;
    int decoder_start = 0;
};

/// Throws Error{unsupported} for an unknown architecture, Error{format} for a missing or absurd size.
ModelConfig read_config(const GgufFile& file);

/// Sizes of experts, and how they are chosen. Throws Error{format, unsupported}: what there is not, or cannot
/// be. experts.cpp.
void read_experts(const GgufFile& file, const std::string& prefix, ModelConfig& config);

/// Of embedding, residuals, scores and logits, where the file says them: keys embedding_scale,
/// residual_scale, attention.scale and logit_scale, by which logits are divided. Throws Error{format}: one is
/// not positive.
void read_scales(const GgufFile& file, const std::string& prefix, ModelConfig& config);

/// How q grow with their position: attention.temperature_scale, and temperature_length, or the context before
/// RoPE's scaling. `usual`: where the file does not say.
void read_query_growth(const GgufFile& file, const std::string& prefix, double usual, ModelConfig& config);

/// What layers differ in, but for RoPE, which is one for all, if there is one. Throws Error{format} for
/// nonsense, Error{unsupported} for a window that the architecture does not honour and a layer without KV
/// heads.
void read_layers(const GgufFile& file, const std::string& prefix, ModelConfig& config);

/// Which of the RoPEs each layer has, given that of layers without a window. Throws Error{format}: the base
/// of the others is not positive.
void choose_ropes(const GgufFile& file, const std::string& prefix, const RopeConfig& rope,
                  ModelConfig& config);

/// ALiBi's slope of a head (Press et al., 2022, as published for any number of heads): what is added to a
/// score for each row that its own comes later.
float alibi_slope(const ModelConfig& config, int head);

/// T5's bucket of a distance (row - query), as published (Raffel et al., section 2.1): half of them for the
/// nearest one by one, the others ever wider up to relative_distance. Causal: rows after the query have
/// bucket 0, else buckets of their own.
int relative_bucket(const ModelConfig& config, int64_t distance, bool causal);

/// Angle per position of each rotated pair, and what cos and sin are multiplied with.
struct RopeFrequencies {
    std::vector<double> pairs;
    double magnitude = 1;
    double growth = 0;  // of the magnitude by position: of q, see ModelConfig
    int64_t growth_length = 1;
    int unturned = 0;  // so many pairs before these only grow

    /// cos/sin table [n_ctx, 2 * all pairs] f32 (kernels/backend.h: Rope).
    std::vector<float> table(int64_t n_ctx) const;
};

/// Of one of config.ropes, all scalings applied: linear, llama3 (rope_freqs tensor), YaRN, longrope (its
/// short or long factors by n_ctx, once). Throws Error{format} when the tensor of factors is missing or
/// misshapen or an angle is not finite.
RopeFrequencies rope_frequencies(const ModelConfig& config, const RopeConfig& rope, const GgufFile& file,
                                 int64_t n_ctx);

}  // namespace slimrt
