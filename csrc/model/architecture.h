// What a paper says, as data. An architecture is one of these in arch/ and one line in registry.cpp.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "kernels/backend.h"

namespace slimrt {

enum class Presence { never, optional, required };
/// relative: a learned bias of scores by the distance of row and query (T5); alibi: one that grows with it.
enum class Positions { learned, rope_interleaved, rope_neox, relative, alibi };
/// Of attention and FFN: norms of their inputs, one for both inputs, norms of their outputs, or of inputs and
/// outputs. In files post_attention_norm is one of attention's output, but see ffn_norm.
enum class Norms { before, shared, after, both };
/// Norms of q and k before RoPE, of the architecture's kind and without bias: of each head, or of whole rows.
enum class QkNorm { none, row, head };
/// What an encoder reads: token ids, log-mel frames, samples.
enum class EncoderKind { none, tokens, mel, audio };

/// A convolution in front of an encoder: outputs [n', channels] of rows [n, inputs].
struct Convolution {
    const char* name;
    int width, stride, padding;
    int channels;  // in units of d_model
    Activation activation;
    bool bias = true;
    bool normed = false;  // then normed over all rows and channels at once
};

/// How q and k turn in layers with a window: as in the others; by a table of their own, whose frequencies are
/// not scaled and of the base that rope.freq_base_swa says; or they alone turn, where there is a window at
/// all.
enum class WindowRope { same, own, only };

/// What layers differ in where the file does not say it.
struct LayerPattern {
    int full_period = 0;  // every so many-th layer sees all in spite of a window; 0: none does
    WindowRope window_rope = WindowRope::same;
    double window_base = 0;   // of WindowRope::own; 0: that of the others
    int unturned_period = 0;  // in every so many-th layer q and k know no positions; 0: in none
};

class GgufFile;
struct ModelConfig;
/// Of a layer's feed-forward part, model/ffn.h.
struct Ffn;
extern const Ffn dense_ffn;
extern const Ffn expert_ffn;  // experts in layers that have a router, else as dense_ffn

struct Architecture {
    const char* name;  // general.architecture in GGUF, and the prefix of its metadata keys
    NormKind norm = NormKind::rms;
    bool norm_bias = true, norm_weight = true;  // of NormKind::layer
    bool embedding_norm = false;                // of the token embedding
    Norms norms = Norms::before;
    const char* ffn_norm = "ffn_norm";       // what files call the norm of the FFN's input
    Presence layer_scale = Presence::never;  // a number that a layer's output is multiplied by
    bool sub_norms = false;                  // RMS norms of what W_O and the FFN's down projection read
    Positions positions = Positions::rope_interleaved;
    bool partial_rotary = false;     // rope.dimension_count may be less than a head has
    bool whole_ramp = true;          // YaRN's begins and ends at a pair, else between pairs
    bool parallel_residual = false;  // x + attention(x) + ffn(x)
    QkNorm qk_norm = QkNorm::none;
    bool v_norm = false;        // with QkNorm::head: each head of V too, by RMS and without a weight
    bool k_for_v = false;       // with v_norm: layers without a W_V take K, before its norm, for V
    bool scaled_scores = true;  // by 1 / sqrt(head_dim)
    Presence qkv_bias = Presence::never;
    bool k_bias = true;                      // where there is qkv_bias
    Presence linear_bias = Presence::never;  // attention output and FFN, or
    bool attn_output_bias = true;            // FFN only
    Presence output_bias = Presence::never;
    bool scaled_tied_output = false;          // a head tied to the embedding reads states times d_model^-1/2
    Presence fused_qkv = Presence::optional;  // one attn_qkv tensor, rows q | k | v
    const Ffn* ffn = &dense_ffn;
    Presence gated_ffn = Presence::required;  // down(act(gate x) * up x), else down(act(up x))
    bool fused_gate_up = false;               // one ffn_up tensor, rows gate | up
    Activation activation = Activation::silu;
    std::optional<Activation> ungated_activation;  // where it differs
    Router router;                                 // of expert_ffn; keys may differ
    bool sliding_window = false;                   // honours attention.sliding_window
    LayerPattern layers;
    bool latent = false;  // K and V are made of a latent (MLA): keys and tensors as latent.cpp has them
    /// What a family's files alone say, into the config; or a refusal.
    void (*settle)(const GgufFile& file, const std::string& prefix, ModelConfig& config) = nullptr;
    // Of an encoder, whose layers are as the decoder's, but see all rows.
    EncoderKind encoder = EncoderKind::none;
    bool encoder_positions = false;  // learned, of what layers read
    std::vector<Convolution> convolutions;
};

/// Why a model that goes by this name elsewhere is not run, if that was decided; else "". refused.cpp.
std::string why_refused(const std::string& name);

/// All of them. registry.cpp.
const std::vector<const Architecture*>& architectures();

}  // namespace slimrt
