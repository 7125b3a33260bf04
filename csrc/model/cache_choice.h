// How each layer uses its cache: what was asked for, else what the file says, else the defaults.
#pragma once

#include <string>
#include <vector>

#include "cache/cache_mode.h"
#include "core/gguf.h"
#include "model/weights.h"

namespace slimrt {

/// An option of every layer: one value for all, or one for each.
template <class T>
struct ByLayer {
    T all;
    std::vector<T> each;

    const T& of(int layer) const { return each.empty() ? all : each[layer]; }
};

/// "auto": what the file says, if its mode is used; else mode kv (in an encoder-decoder x and e, where their
/// rows are no wider than K and V) and type f16.
struct CacheOptions {
    ByLayer<std::string> mode{"auto"};
    /// Of the rows of k, v and x: "f16" ...; type_k may also be Levels as text.
    ByLayer<std::string> type_k{"auto"}, type_v{"auto"};
    /// In modes with a residual: its type and width. "auto" and -1: what the file says, or the width of the
    /// folded tensors; there is no other default.
    ByLayer<std::string> residual_type{"auto"};
    ByLayer<int> rank{-1};
    /// How much softmax weight decoding may leave unread, for each head and query: the sum of the weights, or
    /// the root of the sum of their squares (AttentionArgs); one of the two. sparse_delta < 0: what the file
    /// says.
    float sparse_threshold = 0, sparse_delta = 0;
    std::string cross = "auto", cross_type = "auto";  // of an encoder's output: mode and type
    int64_t n_source = 0;  // most rows of an encoder's output in a sequence; 0: the model's own
    int64_t n_ctx = 0;     // 0: the smaller of the model's training context and 4096
    int n_seqs = 1;        // the most sequences in one step
    /// Tokens whose rows the cache holds, of all sequences together; 0: n_ctx for each of n_seqs.
    int64_t cache_tokens = 0;
    int n_batch = 512;  // most tokens in one step
};

/// A layer's options with what was asked for, what the file says and the defaults filled in.
struct LayerOptions {
    int owner = 0;  // the layer whose rows this one reads: itself, or one before it
    const CacheMode* mode = nullptr;
    DType type_k = DType::F16, type_v = DType::F16;
    Levels levels;              // of a mode with has_levels()
    int latent_heads = 1;       // of mode lowrank, see AttnConfig
    int rank = -1;              // of a mode with has_residual(); -1: unknown
    std::string residual_type;  // likewise; empty: unknown
    int v_heads = 0;            // of a mode with has_v_heads()
};

struct LayerChoice {
    const CacheMode* mode;
    AttnConfig config;
    int owner;                 // the layer whose rows this one reads: itself, or one before it
    bool shared = false;       // later layers read its rows too
    bool rotates_keys = true;  // false: it reads keys before RoPE and does not rotate them (MLKV)

    bool owns() const { return owner == config.layer; }
};

struct CacheChoices {
    std::vector<LayerChoice> layers;
    std::vector<LayerChoice> cross;   // of an encoder's output, all in one mode; empty without an encoder
    int64_t n_ctx = 0, n_source = 0;  // resolved
};

/// One for each layer, not yet checked against its attention. Arguments and errors as of choose_caches().
std::vector<LayerOptions> resolve_layers(const GgufFile& file, const ModelConfig& config,
                                         const CacheOptions& options, const ExtraTensors& extra = {});

/// One for each layer, checked. extra: the caller's tensors. Throws Error{argument} for lists of the wrong
/// length and ranks that do not match, Error{unsupported} for unknown names, Error{cache_unsupported} for a
/// mode that a layer cannot have, Error{format} for invalid values in the file.
CacheChoices choose_caches(const GgufFile& file, const ModelConfig& config, const CacheOptions& options,
                           const ExtraTensors& extra);

}  // namespace slimrt
