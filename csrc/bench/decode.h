// Text as token ids through a whole model.
#pragma once

#include <string>
#include <vector>

#include "bench/json.h"

namespace slimrt::bench {

/// modes: "kv", "k:q8" ...; "all": each that is legal for every layer and needs no fold that the file lacks.
/// prompt: token ids. depth: tokens that are cached before decoding is timed; 0: the prompt's.
struct Run {
    std::string model, isa;
    std::vector<std::string> caches{"all"};
    std::vector<int32_t> prompt{1, 2, 3, 4, 5, 6, 7, 8};
    int64_t n = 32, depth = 0;
    int threads = 0;
};

/// Of each cache: the likeliest tokens one after another, their rate and the prompt's, and the bytes taken;
/// or why the model cannot have it.
std::vector<Json> decode(const Run& run);

}  // namespace slimrt::bench
