// Owners whose readers take keys before RoPE (MLKV: Zuhri et al., 2024, as trained: without a cache).
#pragma once

#include "cache/cache_mode.h"

namespace slimrt {

/// The mode that such an owner has when `mode` is wanted: itself where its rows hold keys before RoPE, of kv
/// a variant that rotates them on read. None where rows, or what is made of them, are rotated once for all.
const CacheMode* with_unrotated_keys(const CacheMode& mode, const AttnConfig& config);

/// Why there is none; empty where there is one.
std::string unrotated_refusal(const CacheMode& mode, const AttnConfig& config);

}  // namespace slimrt
