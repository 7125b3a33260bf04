// What an engine would allocate: the same code on a backend that only counts.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/devices.h"
#include "model/decoder.h"

namespace slimrt {

struct EngineOptions {
    CacheOptions cache;
    std::string device = "cpu";  // or "cuda", "cuda:1" ...
    int n_threads = 0;           // 0: default_threads()
    uint64_t memory_limit = 0;   // bytes; 0: what the device has available
};

/// Bytes. `mapped` weights are read in place from the file; the rest is allocated.
struct MemoryReport {
    MemoryUse use;
    uint64_t mapped = 0;
    uint64_t cache_bytes_per_token = 0;  // that a token leaves behind in all layers
    uint64_t allocated() const { return use.weights + use.derived + use.cache + use.scratch; }
    uint64_t total() const { return allocated() + mapped; }
};

struct LayerCache {
    std::string mode, type;  // type: of k, v or x, "f16" or, of k and v, "f16+f32"
    int rank;                // of the residual, and its type: 0 and "" where there is none
    std::string residual_type;
    size_t bytes_per_token;
    int64_t max_rows;   // that it keeps of a sequence: n_ctx, or what its window and a step need
    size_t bytes_held;  // of a sequence of n_ctx tokens; less than is allocated
    int v_heads;        // KV heads that keep V beside K, in a mode that computes V
};

/// How an encoder's output is kept; empty mode without an encoder.
struct CrossCache {
    std::string mode, type;
    size_t bytes_per_row = 0;  // of all layers
};

struct EngineInfo {
    ModelConfig config;
    CacheOptions cache;
    std::vector<LayerCache> layers;
    CrossCache cross;
    std::string device;
    int n_threads;
    MemoryReport memory;
};

/// Bytes free on a device, as EngineOptions names it; 0: unknown. Throws Error{unsupported}: there is none.
uint64_t available_on(const std::string& device);

/// What Engine would allocate, to the byte: the same code on a backend that only counts. Reads no weight.
EngineInfo plan(const GgufFile& file, const EngineOptions& options);

/// What the planner measures of one configuration. activations: bytes of scratch that no step exceeds;
/// workspace: the same of the backend's own.
struct Measured {
    EngineInfo info;
    size_t activations, workspace;
    uint64_t available;
};
Measured measure(const GgufFile& file, const EngineOptions& options, const ExtraTensors& extra);
/// Throws Error{wont_fit} with the numbers. limit: EngineOptions::memory_limit.
void require_fit(const Measured& measured, uint64_t limit);

EngineInfo describe(Decoder& decoder, const Backend& backend, int n_threads);

}  // namespace slimrt
