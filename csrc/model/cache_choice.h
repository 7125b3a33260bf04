// How each layer's context memory is used: what was asked for, else what the file says, else the defaults.
#pragma once

#include <string>
#include <vector>

#include "cache/cross_mode.h"
#include "core/gguf.h"
#include "model/weights.h"

namespace slimrt {

/// An option of every layer: one value for all, or a list with one a layer.
template <class T>
struct ByLayer {
    T all;
    std::vector<T> each;

    const T& of(int layer) const { return each.empty() ? all : each[layer]; }
};

/// "auto": what the file says, which holds for its own mode only; else mode kv (beside an encoder x and e,
/// where their rows are no wider) and type f16.
struct CacheOptions {
    ByLayer<std::string> mode{"auto"};
    ByLayer<std::string> type_k{"auto"}, type_v{"auto"};  // of k, v and x: "f16" ...
    /// Of modes with a residual: its type and width. "auto" and -1: what the file says, or the width of the
    /// tensors; there is no other default.
    ByLayer<std::string> residual_type{"auto"};
    ByLayer<int> rank{-1};
    float sparse_threshold =
        0;  // softmax weight that decoding may leave unread, of each head (AttentionArgs)
    std::string cross = "auto", cross_type = "auto";  // of an encoder's output: CrossMode, type of its rows
    int64_t n_source = 0;  // most rows of an encoder's output, of each sequence; 0: the model's own
    int64_t n_ctx = 0;     // 0: the smaller of the model's training context and 4096
    int n_seqs = 1;        // sequences that may be full at once, and the most in one step
    int n_batch = 512;     // most tokens in one step
};

struct LayerChoice {
    const CacheMode* mode;
    AttnConfig config;
};

/// How all layers keep an encoder's output; mode null without an encoder.
struct CrossChoice {
    const CrossMode* mode = nullptr;
    AttnConfig config;

    AttnConfig of(int layer) const {
        AttnConfig c = config;
        c.layer = layer;
        return c;
    }
};

struct CacheChoices {
    std::vector<LayerChoice> layers;
    CrossChoice cross;
    int64_t n_ctx = 0, n_source = 0;  // resolved
};

/// One a layer, each legal. `extra`: the tensors that a caller brings along. Throws Error{argument} for lists
/// of the wrong length and ranks that do not match, Error{unsupported} for unknown names,
/// Error{cache_unsupported} for a mode that a layer cannot have, Error{format} for a file that says nonsense.
CacheChoices choose_caches(const GgufFile& file, const ModelConfig& config, const CacheOptions& options,
                           const ExtraTensors& extra);

}  // namespace slimrt
