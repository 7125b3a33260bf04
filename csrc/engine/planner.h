// What an engine would allocate: its own code on a backend that only counts.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/devices.h"
#include "model/decoder.h"

namespace slimrt {

struct EngineOptions {
    CacheOptions cache;
    std::string device = "cpu";  // or "cuda", "cuda:1" ..., or a list: share_layers()
    int n_threads = 0;           // 0: default_threads()
    uint64_t memory_limit = 0;   // bytes; 0: what the device has available
};

/// Bytes. `mapped` weights are read in place from the file; the rest is allocated.
struct MemoryReport {
    MemoryUse use;
    uint64_t mapped = 0;
    uint64_t cache_bytes_per_token = 0;  // of a token's rows in all layers
    uint64_t allocated() const { return use.weights + use.derived + use.cache + use.scratch; }
    uint64_t total() const { return allocated() + mapped; }
    void operator+=(const MemoryReport& other) {
        use.weights += other.use.weights, use.derived += other.use.derived;
        use.cache += other.use.cache, use.scratch += other.use.scratch;
        mapped += other.mapped, cache_bytes_per_token += other.cache_bytes_per_token;
    }
};

struct LayerCache {
    std::string mode, type;  // type: of k, v or x, "f16"; where k and v differ, "f16+f32"
    int rank;                // of the residual, and its type: 0 and "" where there is none
    std::string residual_type;
    size_t bytes_per_token;
    int64_t max_rows;   // rows kept of a sequence: n_ctx, or what its window and a step need
    size_t bytes_held;  // rows of a sequence of n_ctx tokens; more is allocated
    int v_heads;        // KV heads that keep V beside K, in a mode that computes V
};

/// How an encoder's output is stored; without an encoder mode is empty.
struct CrossCache {
    std::string mode, type;
    size_t bytes_per_row = 0;  // in all layers
};

/// The memory of layers [begin, end) on their device.
struct PartInfo {
    std::string device;
    int begin, end;
    MemoryReport memory;
};

struct EngineInfo {
    ModelConfig config;
    CacheOptions cache;
    std::vector<LayerCache> layers;
    CrossCache cross;
    std::string device;
    int n_threads;
    MemoryReport memory;  // of all parts
    std::vector<PartInfo> parts;
};

/// What Engine would allocate, to the byte: the same code on a backend that only counts. Reads no weight.
EngineInfo plan(const GgufFile& file, const EngineOptions& options);

/// The matrices of the file that an engine on the CPU has, by name, as it holds them: with types and sizes,
/// without data.
std::map<std::string, Tensor> plan_matrices(const GgufFile& file, const CacheOptions& options);

/// What the planner measures. For each part: activations, bytes of scratch that are enough for any step;
/// workspaces, the same of the backend's own; available, bytes free on its device, 0: unknown.
struct Measured {
    EngineInfo info;
    std::vector<DeviceLayers> devices;
    std::vector<size_t> activations, workspaces;
    std::vector<uint64_t> available;
};
Measured measure(const GgufFile& file, const EngineOptions& options, const ExtraTensors& extra);
/// Throws Error{wont_fit} with the numbers. limit: EngineOptions::memory_limit.
void require_fit(const Measured& measured, uint64_t limit);

EngineInfo describe(Decoder& decoder, std::span<const DeviceLayers> devices, int n_threads);

/// A backend for each device, and how many layers each computes.
std::vector<std::unique_ptr<Backend>> open_backends(std::span<const DeviceLayers> devices, int n_threads,
                                                    bool dry);
std::vector<BackendLayers> shares_of(std::span<const DeviceLayers> devices,
                                     std::span<const std::unique_ptr<Backend>> backends);

}  // namespace slimrt
