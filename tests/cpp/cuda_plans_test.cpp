// What the host decides for devices that are not at hand, before it starts a kernel: which one computes a
// call's attention, on how many processors, how often weights are read, and whether the workspace that a plan
// of one sequence measures suffices for many. Prints a table, which tests/emulated.sh holds against
// tests/cuda_plans.txt; exits 1 where a rule is broken.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>
#include <vector>

#include "core/error.h"
#include "cuda_host_runtime.h"
#include "kernels/cuda/absorbed.h"
#include "kernels/cuda/attention_view.h"
#include "kernels/cuda/linear_job.cuh"

using namespace slimrt;

namespace slimrt::cuda {
void check(cudaError_t result, const char* what) {
    if (result != cudaSuccess) std::printf("failed: %s\n", what), std::exit(1);
}
}  // namespace slimrt::cuda

namespace {

using cuda::Device;

int failures = 0;

void require(bool good, const Device& device, const std::string& what) {
    if (!good) std::fprintf(stderr, "FAIL %s: %s\n", device.name.c_str(), what.c_str()), ++failures;
}

struct Model {
    const char* name;
    const char* mode;  // kv, k, or e: whole rows for scores too
    int heads, kv, dim;
    DType type = DType::BF16;
};
constexpr Model kModels[] = {
    {"7B", "k", 32, 32, 128},      {"13B", "k", 40, 40, 128},
    {"70B-MHA", "k", 64, 64, 128}, {"head_dim 256", "kv", 8, 8, 256},
    {"Qwen3", "kv", 32, 8, 128},   {"Whisper-large", "e", 20, 20, 64, DType::F16},
};

/// The tensors of a call are addresses that nobody reads.
struct Call {
    std::vector<AttentionSequence> sequences;
    ScoreTerm score;
    ValueTerm value;
    AttentionArgs args;

    Call(const Model& m, int n_sequences, int n_queries) {
        const bool whole = m.mode != std::string("kv"), wide = m.mode == std::string("e");
        const int width = m.kv * m.dim, tokens = n_sequences * n_queries;
        auto* const there = reinterpret_cast<std::byte*>(uintptr_t{1} << 30);
        const auto floats = [&](int64_t rows, int64_t columns) {
            return Tensor(there, DType::F32, rows, columns);
        };
        const int stored = whole ? 1 : m.kv;
        const Rows rows{.base = there,
                        .dtype = m.type,
                        .width = width,
                        .heads = stored,
                        .block_stride = head_bytes(m.type, width / stored, 32, 0).total() * stored,
                        .block_tokens = 32};
        for (int s = 0; s < n_sequences; ++s)
            sequences.push_back(
                {.query = s * n_queries, .n_queries = n_queries, .position = 4000, .end = 4000});
        score = {.stored = rows,
                 .fresh = floats(tokens, width),
                 .n_heads = wide ? 1 : m.kv,
                 .dim = wide ? width : m.dim,
                 .q = floats(tokens, int64_t(m.heads) * (wide ? width : m.dim))};
        if (m.mode == std::string("k")) score.rope = {floats(8192, m.dim), m.dim, true};
        const int columns = whole ? width : m.dim;
        value = {rows, floats(tokens, width), whole ? 1 : m.kv, columns,
                 floats(tokens, int64_t(m.heads) * columns)};
        args = {.sequences = sequences, .scores = {&score, 1}, .values = {&value, 1}, .n_heads = m.heads};
    }
    Call(const Call&) = delete;
};

void attention_rows(const Device& device) {
    constexpr const char* kNames[] = {"absorbed", "decode", "prefill", "general"};
    for (const Model& m : kModels) {
        std::printf("%-12s %-13s %-2s", device.name.c_str(), m.name, m.mode);
        const Call planned(m, 1, m.dim);
        const size_t workspace = cuda::attention_workspace(device, planned.args);
        for (const auto& [n_sequences, n_queries] : {std::pair{1, 1}, {64, 1}, {1, 5}}) {
            const Call call(m, n_sequences, n_queries);
            const auto kernel = cuda::attention_kernel(device, call.args);
            std::printf("  %dx%d %s", n_sequences, n_queries, kNames[int(kernel)]);
            // A block has at most 512 columns of the rows that all heads read, so Orin Nano has too few.
            const bool too_wide = m.kv * m.dim > 512 * device.processors;
            require((kernel == cuda::AttentionKernel::general) == too_wide, device,
                    std::string(m.name) + ": " + kNames[int(kernel)]);
            require(cuda::attention_workspace(device, call.args) <= workspace, device,
                    std::string(m.name) + " needs more workspace than a plan knows");
        }
        std::printf("  %zu MiB", workspace >> 20);
        if (const auto shape = cuda::absorbed_shape(device, planned.args))
            std::printf("  %s of %d, %d at once, %d of %d processors",
                        shape->via_memory ? "teams" : "clusters", shape->team, shape->teams,
                        shape->team * shape->teams, device.processors);
        std::printf("\n");
    }
}

/// Kernels that products start.
int launches_of(const Device& device, Tensor x, std::span<const Product> products) {
    cudaGraph_t graph = nullptr;
    size_t launches = 0;
    cuda::check(cudaStreamBeginCapture(device.stream, cudaStreamCaptureModeThreadLocal), "recording");
    cuda::linear(device, x, 1, products, nullptr);
    cuda::check(cudaStreamEndCapture(device.stream, &graph), "recording");
    cuda::check(cudaGraphGetNodes(graph, nullptr, &launches), "counting");
    cuda::check(cudaGraphDestroy(graph), "forgetting");
    return int(launches);
}

/// How often weights of gate and up of a model of 8B are read: by as many kernels as are started.
int passes(const Device& device, DType dtype, int tokens, int columns = 4096) {
    auto* const there = reinterpret_cast<std::byte*>(uintptr_t{1} << 30);
    const int rows = 14336;
    const Tensor x(there, DType::F32, tokens, columns), weight(there, dtype, rows, columns);
    const Tensor out(there, DType::F32, tokens, rows);
    const Product products[] = {{weight, {}, out}, {weight, {}, out}};
    return launches_of(device, x, products);
}

constexpr DType kWeights[] = {DType::F16,  DType::Q8_0, DType::Q4_0, DType::Q4_K,
                              DType::Q5_K, DType::Q6_K, DType::Q2_K, DType::MXFP4};

void weight_row(const Device& device) {
    std::printf("%-12s weights are read by up to 8 tokens:", device.name.c_str());
    for (const DType dtype : kWeights) {
        int most = 0;
        for (int tokens = 1; tokens <= 8; ++tokens) most = std::max(most, passes(device, dtype, tokens));
        std::printf("  %s %d", dtype_info(dtype).name, most);
        require(most == 1, device, std::string(dtype_info(dtype).name) + " weights are read more than once");
    }
    std::printf("\n");
}

/// A launch of few_kernel has no more blocks for each multiprocessor than have room there, with the static
/// memory that cuobjdump tells (tests/test_cuda_binary.py) and 1 KB of the system's for each.
void blocks_at_once(const Device& device) {
    constexpr size_t kStatic = 144, kReserved = 1024, kUnit = 128;
    for (const DType dtype : kWeights)
        for (const int columns : {2048, 4096, 8192, 14336})
            for (int tokens = 1; tokens <= 8; ++tokens) {
                passes(device, dtype, tokens, columns);
                const cudaLaunchConfig_t& launch = cuda_host::last_launch;
                const size_t own = (launch.dynamicSmemBytes + kStatic + kUnit - 1) / kUnit * kUnit;
                const size_t blocks = cuda::divide_up(int(launch.gridDim.x), device.processors);
                require(own <= device.shared_bytes &&
                            blocks * (own + kReserved) <= device.shared_bytes + kReserved,
                        device,
                        concat(dtype_info(dtype).name, ", ", tokens, " tokens, k ", columns, ": ", blocks,
                               " blocks of ", launch.dynamicSmemBytes, " bytes have no room"));
            }
}

/// How the products of a model of 8B are cut, for a batch of a prompt and for fewer tokens.
void tile_row(const Device& device) {
    struct {
        const char* name;
        int k;
        std::vector<int> rows;
    } const products[] = {{"qkv", 4096, {4096, 1024, 1024}},
                          {"o", 4096, {4096}},
                          {"gate+up", 4096, {14336, 14336}},
                          {"down", 14336, {4096}}};
    for (const int tokens : {512, 100, 64, 16}) {
        std::printf("%-12s %d tokens:", device.name.c_str(), tokens);
        for (const auto& product : products) {
            cuda::Job job{.tokens = tokens, .k = product.k};
            for (const int rows : product.rows) job.parts[job.n_parts++].rows = rows;
            const cuda::Tiling t = cuda::tiling_of(device, job);
            const int blocks = cuda::tiles_of(job, t.rows) * cuda::divide_up(tokens, t.tokens) * t.splits;
            std::printf("  %s %dx%d", product.name, t.tokens, t.rows);
            if (t.splits > 1) std::printf(" of k/%d", t.splits);
            std::printf(", %d blocks", blocks);
            require(2 * blocks > device.processors, device,
                    std::string(product.name) + ": half of the processors are idle");
        }
        std::printf("\n");
    }
}

/// W_KV of a 7B in F32: for few tokens it is read for every eight, for more it and x are split first.
void float_row(const Device& device) {
    auto* const there = reinterpret_cast<std::byte*>(uintptr_t{1} << 30);
    std::printf("%-12s f32 weights of 4096 x 4096:", device.name.c_str());
    for (const int tokens : {8, 24, 25, 128, 512}) {
        const Tensor x(there, DType::F32, tokens, 4096), weight(there, DType::F32, 4096, 4096);
        const Product product{weight, {}, x};
        const size_t workspace = cuda::linear_workspace(device, x, 1, {&product, 1});
        const int launches = launches_of(device, x, {&product, 1});
        std::printf("  %d tokens %d kernels, %zu MiB", tokens, launches, workspace >> 20);
        require((workspace == 0) == (launches == cuda::divide_up(tokens, cuda::kFewTokens)), device,
                "F32 weights are split where they need not be");
    }
    std::printf("\n");
}

/// What no kernel multiplies into scores of whole rows goes to one that does, and what has no room is
/// refused.
void limits(const Device& device) {
    Call call({"7B", "e", 20, 20, 64, DType::F16}, 1, 1);
    ScoreTerm by_heads = call.score;
    by_heads.n_heads = 20, by_heads.dim = 64, by_heads.q.cols = 20 * 64;
    by_heads.row_scale = Tensor(call.score.q.data, DType::F32, 1, 20 * 64);
    ScoreTerm terms[] = {call.score, by_heads};
    call.args.scores = terms;
    require(cuda::attention_kernel(device, call.args) == cuda::AttentionKernel::absorbed, device,
            "whole rows beside heads are not absorbed");
    terms[1].factors = {.base = call.score.q.data, .dtype = DType::F32, .width = 1, .block_stride = 128};
    terms[1].factors.block_tokens = 32;
    require(cuda::attention_kernel(device, call.args) == cuda::AttentionKernel::general, device,
            "factors beside scores of whole rows are absorbed, which leaves them out");
    const Call wide({"16384 columns", "e", 1, 1, 16384, DType::F32}, 1, 1);
    std::string said;
    try {
        cuda::attention_workspace(device, wide.args);
    } catch (const Error& error) {
        said = error.what();
    }
    const bool fits = device.shared_bytes > size_t(150) << 10;
    require(fits == said.empty() && (fits || said.find("shared memory") != said.npos), device,
            "32768 columns of a query: " + said);
}

}  // namespace

int main() {
    cudaStream_t stream = nullptr;
    cuda::check(cudaStreamCreate(&stream), "making a stream");
    // groups: of processors, as cards may have them; where there are no clusters, one of all.
    const auto device = [&](const char* name, int capability, size_t shared_kib, std::vector<int> groups) {
        Device d{.capability = capability, .shared_bytes = shared_kib << 10, .name = name, .stream = stream};
        for (const int processors : groups) {
            d.processors += processors;
            for (int size = 1; size <= cuda::kMaxCluster && capability == 90; ++size)
                d.clusters[size] += processors / size;
        }
        return d;
    };
    for (const Device& d : {
             device("H100 SXM", 90, 227, {16, 16, 16, 16, 16, 16, 18, 18}),
             device("H100 PCIe", 90, 227, {14, 16, 16, 16, 16, 18, 18}),
             device("H20", 90, 227, {10, 10, 10, 12, 12, 12, 12}),
             device("A100", 80, 163, {108}),
             device("RTX 3090", 86, 99, {82}),
             device("RTX 4090", 89, 99, {128}),
             device("RTX 5090", 120, 99, {170}),
             device("Orin", 87, 163, {16}),
             device("Orin Nano", 87, 163, {8}),
         }) {
        attention_rows(d);
        weight_row(d);
        blocks_at_once(d);
        tile_row(d);
        float_row(d);
        limits(d);
    }
    return failures != 0;
}
