// Recording and replaying of steps: sequences in device memory, and a step's calls as a CUDA graph.
#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "core/error.h"
#include "core/notes.h"
#include "kernels/cuda/cuda_backend.h"

namespace slimrt::cuda {

bool CudaBackend::grow(Buffer& buffer, size_t bytes, const char* what) {
    if (bytes <= buffer.bytes) return false;
    require_no_recording("needs more memory");
    forget_graphs();  // they hold its address
    buffer = {};
    buffer = small_.alloc(MemoryKind::scratch, 2 * bytes, what);
    return true;
}

/// One copy. Tables are last, since they are the largest and rarely change: equal ones are not sent again.
void CudaBackend::put(Places& places, std::span<const int32_t> numbers,
                      std::span<AttentionSequence* const> sequences) {
    constexpr size_t kAlign = alignof(PlacedSequence);
    const auto aligned = [](size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; };
    std::vector<int32_t> ids;
    places.table_at.clear();
    for (const AttentionSequence* s : sequences) {
        if (!s->table) continue;
        places.table_at.emplace_back(s->table, ids.size());
        ids.insert(ids.end(), s->table, s->table + (s->end + kBlockTokens - 1) / kBlockTokens);
    }
    const size_t sequences_at = aligned(numbers.size_bytes());
    const size_t tables_at = sequences_at + sequences.size() * sizeof(PlacedSequence);
    const size_t bytes = tables_at + ids.size() * sizeof(int32_t);
    const bool moved = grow(places.data, bytes, "what a step reads");
    const bool stay = !moved && tables_at == places.tables_at && ids == places.ids;
    places.sequences_at = sequences_at;
    places.tables_at = tables_at;
    places.ids = std::move(ids);
    auto* const tables = reinterpret_cast<const int32_t*>(places.data.data.get() + tables_at);
    places.placed.clear();
    size_t table = 0;
    for (AttentionSequence* s : sequences) {
        const int32_t* const there = s->table ? tables + places.table_at[table++].second : nullptr;
        s->uploaded = static_cast<int>(places.placed.size());
        places.placed.push_back(
            {there, s->position, s->begin, s->end, s->query, s->n_queries, s->fresh, s->causal});
    }
    std::vector<std::byte> all(stay ? tables_at : bytes);
    const auto write = [&](size_t at, const auto& from) {
        if (!from.empty()) std::memcpy(all.data() + at, from.data(), from.size() * sizeof(from[0]));
    };
    write(0, numbers);
    write(sequences_at, places.placed);
    if (!stay) write(tables_at, places.ids);
    send(places.data.data.get(), all.data(), all.size());
}

Tensor CudaBackend::upload_step(std::span<const int32_t> numbers,
                                std::span<const std::span<AttentionSequence>> lists) {
    const Current current = ready();
    if (!current) return Backend::upload_step(numbers, lists);
    std::vector<AttentionSequence*> all;
    for (const std::span<AttentionSequence> list : lists)
        for (AttentionSequence& s : list) all.push_back(&s);
    put(places_, numbers, all);
    return {places_.data.data.get(), DType::I32, 1, static_cast<int64_t>(numbers.size())};
}

void CudaBackend::capture_and_replay(const std::string& shape, const std::function<void()>& body) {
    const Current current = ready();
    if (!current) return body();
    if (!graphs_.contains(shape)) {
        run_fused(body);  // afterwards everything is allocated and loaded
        graph_of(shape);
        return;
    }
    Graph& graph = graph_of(shape);
    if (!graph.exec && !graph.direct) record(graph, body);
    if (graph.direct) return run_fused(body);
    check(cudaGraphLaunch(graph.exec, device_.stream), "starting a recorded step");
}

/// Evicts the graph that was not launched for the longest time.
CudaBackend::Graph& CudaBackend::graph_of(const std::string& shape) {
    Graph& graph = graphs_[shape];
    graph.last = ++n_played_;
    if (graphs_.size() > kMaxGraphs) {
        const auto oldest = std::ranges::min_element(
            graphs_, {}, [](const auto& shape_and_graph) { return shape_and_graph.second.last; });
        if (oldest->second.exec) cudaGraphExecDestroy(oldest->second.exec);
        graphs_.erase(oldest);
    }
    return graph;
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
    cudaError_t failed = try_to_record(graph, body);
    if (failed == cudaSuccess) return;
    // Not every driver records kernels that begin early.
    const bool overlapped = std::exchange(device_.overlaps, false);
    if (overlapped && try_to_record(graph, body) == cudaSuccess) {
        add_note(concat(description(), " does not record kernels that begin while the one before runs (",
                        cudaGetErrorName(failed), "): they wait for each other"));
        return;
    }
    device_.overlaps = overlapped;
    graph.direct = true;
    if (!std::exchange(unrecorded_, true))
        add_note(concat(description(), " records no steps as graphs (", cudaGetErrorName(failed),
                        "): their kernels are started one by one, which takes longer"));
}

/// Also throws what the calls throw, unless CUDA failed at recording them.
cudaError_t CudaBackend::try_to_record(Graph& graph, const std::function<void()>& body) {
    cudaGraph_t calls = nullptr;
    std::exception_ptr thrown;
    cudaError_t result = cudaStreamBeginCapture(device_.stream, cudaStreamCaptureModeThreadLocal);
    if (result == cudaSuccess) {
        recording_ = true;
        try {
            run_fused(body);
        } catch (...) {
            thrown = std::current_exception();
        }
        recording_ = false;
        result = cudaStreamEndCapture(device_.stream, &calls);
    }
    if (result == cudaSuccess && !thrown) result = cudaGraphInstantiate(&graph.exec, calls, 0);
    if (calls) cudaGraphDestroy(calls);
    if (result == cudaSuccess && thrown) std::rethrow_exception(thrown);
    if (result != cudaSuccess) cudaGetLastError();  // others in this thread may ask for theirs
    return result;
}

void CudaBackend::forget_graphs() {
    for (auto& [shape, graph] : graphs_)
        if (graph.exec) cudaGraphExecDestroy(graph.exec);
    graphs_.clear();
}

}  // namespace slimrt::cuda
