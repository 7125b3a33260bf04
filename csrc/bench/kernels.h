// Tables of what single kernels take on this machine.
#pragma once

#include <string>
#include <vector>

#include "bench/json.h"

namespace slimrt::bench {

/// What to measure with. isa "": the best. Medians of so many turns.
struct Effort {
    std::string isa;
    std::vector<int> threads;
    int megabytes = 256;               // of weights of one type together, more than caches have
    int64_t rows = 1024, cols = 4096;  // of a matrix
    int64_t cached = 8192;             // rows that attention reads
    int turns = 5;
    double seconds = 0.3;  // of trying access to memory
};

/// GB/s of reading memory, by threads.
std::vector<Json> bandwidth(const Effort& effort);
/// Which access to memory is fastest, by kind and threads; what comes later follows it (that of the most
/// threads). With SLIMRT_ACCESS what that says, and nothing is measured.
std::vector<Json> access(const Effort& effort);
/// Products of each type of weight with 1, 8 and 64 tokens, beside the mere reading of the weights.
std::vector<Json> products(const Effort& effort);
/// A layer's attention in every cache mode, of rows of each type, as a token reads them.
std::vector<Json> attention(const Effort& effort);

}  // namespace slimrt::bench
