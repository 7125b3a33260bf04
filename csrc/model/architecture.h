// What a paper says, as data. An architecture is one of these in arch/ and one line in registry.cpp.
#pragma once

#include <vector>

#include "kernels/backend.h"

namespace slimrt {

enum class Presence { never, optional, required };
enum class Positions { learned, rope_interleaved, rope_neox };

struct Architecture {
    const char* name;  // general.architecture in GGUF, and the prefix of its metadata keys
    NormKind norm = NormKind::rms;
    Positions positions = Positions::rope_interleaved;
    Presence qkv_bias = Presence::never;
    Presence linear_bias = Presence::never;  // attention output and FFN
    bool fused_qkv = false;                  // one attn_qkv tensor, rows q | k | v
    bool gated_ffn = true;                   // down(act(gate x) * up x), else down(act(up x))
    bool fused_gate_up = false;              // one ffn_up tensor, rows gate | up
    Activation activation = Activation::silu;
    bool sliding_window = false;  // honours attention.sliding_window
};

/// All of them. registry.cpp.
const std::vector<const Architecture*>& architectures();

}  // namespace slimrt
