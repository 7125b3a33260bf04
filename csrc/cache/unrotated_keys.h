// Shared rows whose readers take keys before RoPE (MLKV: Zuhri et al., 2024, as its models are trained).
#pragma once

#include "cache/cache_mode.h"

namespace slimrt {

/// The mode in which an owner keeps such rows when `mode` is wanted: itself where its rows hold keys before
/// RoPE; for kv a variant that rotates on read. nullptr where rows, or what is made of them, are rotated
/// once.
const CacheMode* with_unrotated_keys(const CacheMode& mode, const AttnConfig& config);

/// Why there is no such mode; empty where there is one.
std::string unrotated_refusal(const CacheMode& mode, const AttnConfig& config);

}  // namespace slimrt
