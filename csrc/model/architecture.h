// What differs between model families, as data. Each is a constant in arch/ and a line in registry.cpp.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "kernels/backend.h"

namespace slimrt {

enum class Presence { never, optional, required };
/// relative: a learned bias of scores by the distance of row and query (T5); alibi: one proportional to it.
enum class Positions { learned, rope_interleaved, rope_neox, relative, alibi };
/// Norms of attention and FFN: of their inputs, of the input that both share, of their outputs, of inputs and
/// outputs, or of the sums of x and their outputs (then none ends the stack). In files post_attention_norm is
/// of attention's output, unless Architecture::ffn_norm names it.
enum class Norms { before, shared, after, both, sums };
/// QK-norm: norms of q and k before RoPE, of the architecture's kind, without bias: of whole rows or each
/// head.
enum class QkNorm { none, row, head };
/// What an encoder reads: token ids, log-mel frames, samples, patches of a group of time series. In a model
/// of series the encoder is all: there is no decoder, and no cache.
enum class EncoderKind { none, tokens, mel, audio, series };

/// A convolution in front of an encoder: outputs [n', channels] of rows [n, inputs].
struct Convolution {
    const char* name;
    int width, stride, padding;
    int channels;  // in units of d_model
    Activation activation;
    bool bias = true;
    bool normed = false;  // over all rows and channels at once (GroupNorm of one group)
};

/// RoPE of layers with a sliding window: as in the others; a table of their own, unscaled, with the base
/// rope.freq_base_swa; or only they have one, if any layer has a window.
enum class WindowRope { same, own, only };

/// Differences between layers that the file does not state.
struct LayerPattern {
    int full_period = 0;  // every so many-th layer has no window; 0: none
    WindowRope window_rope = WindowRope::same;
    double window_base = 0;   // of WindowRope::own; 0: the others' base
    int unturned_period = 0;  // every so many-th layer has no position encoding (NoPE); 0: none
};

class GgufFile;
struct ModelConfig;
/// A layer's feed-forward part, see model/ffn.h.
struct Ffn;
extern const Ffn dense_ffn;
extern const Ffn expert_ffn;  // experts in layers that have a router, else dense_ffn

struct Architecture {
    const char* name;  // general.architecture in GGUF, and the prefix of its metadata keys
    NormKind norm = NormKind::rms;
    bool norm_bias = true, norm_weight = true;  // of NormKind::layer
    Presence embedding_norm = Presence::never;  // of what the first layer reads; an encoder has its own
    Norms norms = Norms::before;
    const char* ffn_norm = "ffn_norm";       // what files call the norm of the FFN's input
    Presence layer_scale = Presence::never;  // a factor of the layer's output
    bool sub_norms = false;                  // RMS norms of the inputs of W_O and of the down projection
    Positions positions = Positions::rope_interleaved;
    bool partial_rotary = false;     // rope.dimension_count may be less than head_dim
    bool whole_ramp = true;          // YaRN's ramp begins and ends at whole pairs
    bool parallel_residual = false;  // x + attention(x) + ffn(x)
    QkNorm qk_norm = QkNorm::none;
    bool v_norm = false;        // with QkNorm::head: an RMS norm of each head of V, without a weight
    bool k_for_v = false;       // with v_norm: layers without W_V use K, before its norm, as V
    bool scaled_scores = true;  // by 1 / sqrt(head_dim)
    Presence qkv_bias = Presence::never;
    bool k_bias = true;                      // where there is qkv_bias
    Presence linear_bias = Presence::never;  // of attention's output and the FFN,
    bool attn_output_bias = true;            // or of the FFN only
    Presence output_bias = Presence::never;
    bool scaled_tied_output = false;          // a tied head's input is times d_model^-1/2
    Presence fused_qkv = Presence::optional;  // one attn_qkv tensor, rows q | k | v
    const Ffn* ffn = &dense_ffn;
    Presence gated_ffn = Presence::required;  // down(act(gate x) * up x), else down(act(up x))
    bool fused_gate_up = false;               // one ffn_up tensor, rows gate | up
    Activation activation = Activation::silu;
    std::optional<Activation> ungated_activation;  // where it differs
    Router router;                                 // of expert_ffn; the file's keys come first
    bool sliding_window = false;                   // supports attention.sliding_window
    int64_t usual_window = 0;                      // of files that lack the keys
    float usual_score_cap = 0, usual_logit_cap = 0;
    float own_longrope = 0;  // attn_factor of the published model, where a file has Phi-3's or none
    LayerPattern layers;
    bool latent = false;  // latent attention (MLA), see latent.cpp
    /// Reads what only this family's files have into config, or refuses the file.
    void (*configure)(const GgufFile& file, const std::string& prefix, ModelConfig& config) = nullptr;
    // Of an encoder. Its layers are as the decoder's, but not causal.
    EncoderKind encoder = EncoderKind::none;
    bool encoder_positions = false;  // a table, added to what the first layer reads
    std::vector<Convolution> convolutions;
};

/// Why a known architecture is not supported; "" for any other. In refused.cpp.
std::string why_refused(const std::string& name);

/// All architectures. In registry.cpp.
const std::vector<const Architecture*>& architectures();

}  // namespace slimrt
