// What a paper says, as data. An architecture is one of these in arch/ and one line in registry.cpp.
#pragma once

#include <vector>

#include "kernels/backend.h"

namespace slimrt {

enum class Presence { never, optional, required };
enum class Positions { learned, rope_interleaved, rope_neox };
/// Of attention and FFN: norms of their inputs, one for both inputs, or norms of their outputs.
enum class Norms { before, shared, after };

struct Architecture {
    const char* name;  // general.architecture in GGUF, and the prefix of its metadata keys
    NormKind norm = NormKind::rms;
    Norms norms = Norms::before;
    Positions positions = Positions::rope_interleaved;
    bool partial_rotary = false;     // rope.dimension_count may be less than a head has
    bool parallel_residual = false;  // x + attention(x) + ffn(x); the key use_parallel_residual may differ
    bool qk_norm = false;            // RMS norms of the whole q and k rows
    Presence qkv_bias = Presence::never;
    Presence linear_bias = Presence::never;  // attention output and FFN
    Presence output_bias = Presence::never;
    Presence fused_qkv = Presence::never;  // one attn_qkv tensor, rows q | k | v
    bool gated_ffn = true;                 // down(act(gate x) * up x), else down(act(up x))
    bool fused_gate_up = false;            // one ffn_up tensor, rows gate | up
    Activation activation = Activation::silu;
    bool sliding_window = false;  // honours attention.sliding_window
};

/// All of them. registry.cpp.
const std::vector<const Architecture*>& architectures();

}  // namespace slimrt
