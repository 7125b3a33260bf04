// Attention of one layer in any cache mode, as decoding a token reads it.
#pragma once

#include <string>
#include <vector>

#include "bench/arrays.h"
#include "cache/cache_mode.h"

namespace slimrt::bench {

/// A layer that this mode serves, of 16 heads of 64 columns: all of them rotate, or a quarter, or none,
/// whichever the mode takes first. type: of all of its rows, or levels where the mode has some.
AttnConfig layer_for(const CacheMode& mode, const std::string& type);

/// What the rows of n tokens take in the layer's cache, and the seconds that a token takes to read them, from
/// its query to the heads before W_O: of each of so many repetitions. Weights and rows are random.
struct LayerTimes {
    std::vector<double> seconds;
    size_t bytes;
};
/// n: whole blocks.
LayerTimes time_layer(Arrays& arrays, const CacheMode& mode, const AttnConfig& config, int64_t n,
                      int repetitions);

}  // namespace slimrt::bench
