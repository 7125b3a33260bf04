// What lets a step be recorded once and replayed: its sequences in device memory, and its calls as a graph.
#include <cstring>

#include "core/error.h"
#include "kernels/cuda/cuda_backend.h"

namespace slimrt::cuda {

bool CudaBackend::grow(Buffer& buffer, size_t bytes, const char* what) {
    if (bytes <= buffer.bytes) return false;
    forget_graphs();  // they know its address
    buffer = {};
    buffer = small_.alloc(MemoryKind::scratch, 2 * bytes, what);
    return true;
}

/// Tables first, since the sequences say where they are; what is there already is not sent again.
void CudaBackend::put(Places& places, std::span<AttentionSequence* const> sequences) {
    std::vector<int32_t> ids;
    places.table_at.clear();
    for (const AttentionSequence* s : sequences) {
        if (!s->table) continue;
        places.table_at.emplace_back(s->table, ids.size());
        ids.insert(ids.end(), s->table, s->table + (s->end + kBlockTokens - 1) / kBlockTokens);
    }
    const bool moved = grow(places.tables, ids.size() * sizeof(int32_t), "block tables");
    auto* const tables = reinterpret_cast<const int32_t*>(places.tables.data.get());
    if (moved || ids != places.ids) send(places.tables.data.get(), ids.data(), ids.size() * sizeof(int32_t));
    places.ids = std::move(ids);
    places.placed.clear();
    size_t table = 0;
    for (AttentionSequence* s : sequences) {
        const int32_t* const there = s->table ? tables + places.table_at[table++].second : nullptr;
        s->uploaded = static_cast<int>(places.placed.size());
        places.placed.push_back(
            {there, s->position, s->begin, s->end, s->query, s->n_queries, s->fresh, s->causal});
    }
    const size_t bytes = places.placed.size() * sizeof(PlacedSequence);
    grow(places.sequences, bytes, "sequences");
    send(places.sequences.data.get(), places.placed.data(), bytes);
}

void CudaBackend::upload_sequences(std::span<const std::span<AttentionSequence>> lists) {
    const Current current = ready();
    if (!current) return;
    std::vector<AttentionSequence*> all;
    for (const std::span<AttentionSequence> list : lists)
        for (AttentionSequence& s : list) all.push_back(&s);
    put(places_, all);
}

void CudaBackend::capture_and_replay(const std::string& shape, const std::function<void()>& body) {
    const Current current = ready();
    if (!current) return body();
    const auto known = graphs_.find(shape);
    if (known == graphs_.end()) {
        run_fused(body);  // what it allocates and loads, it has then
        graphs_.try_emplace(shape);
        return;
    }
    if (!known->second.exec) record(known->second, body);
    check(cudaGraphLaunch(known->second.exec, device_.stream), "starting a recorded step");
}

void CudaBackend::run_fused(const std::function<void()>& calls) {
    fusion_.begin();
    try {
        calls();
        fusion_.end();
    } catch (...) {
        fusion_.drop();
        throw;
    }
}

void CudaBackend::record(Graph& graph, const std::function<void()>& body) {
    cudaGraph_t calls = nullptr;
    check(cudaStreamBeginCapture(device_.stream, cudaStreamCaptureModeThreadLocal), "recording a step");
    recording_ = true;
    try {
        run_fused(body);
    } catch (...) {
        recording_ = false;
        cudaStreamEndCapture(device_.stream, &calls);
        if (calls) cudaGraphDestroy(calls);
        throw;
    }
    recording_ = false;
    check(cudaStreamEndCapture(device_.stream, &calls), "recording a step");
    const cudaError_t made = cudaGraphInstantiate(&graph.exec, calls, 0);
    cudaGraphDestroy(calls);
    check(made, "making a recorded step");
}

void CudaBackend::forget_graphs() {
    for (auto& [shape, graph] : graphs_)
        if (graph.exec) cudaGraphExecDestroy(graph.exec);
    graphs_.clear();
}

}  // namespace slimrt::cuda
