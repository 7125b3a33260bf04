// Memory, streams and graphs as the CUDA runtime has them. A stream is a list of what is yet to run.
#include <sys/mman.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <set>
#include <vector>

#include "cuda_host_runtime.h"

// Only there under AddressSanitizer.
extern "C" {
[[gnu::weak]] void __asan_poison_memory_region(const volatile void* p, size_t bytes);
[[gnu::weak]] void __asan_unpoison_memory_region(const volatile void* p, size_t bytes);
}

using namespace cuda_host;
using Clock = std::chrono::steady_clock;

struct CUgraph_st {
    std::vector<Work> nodes;
};
struct CUgraphExec_st {
    std::vector<Work> nodes;
};
struct CUstream_st {
    bool waits_for_default = true;
    int device = 0;
    std::vector<Work> queue;
    bool capturing = false, invalidated = false;
    cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
    std::vector<Work> captured;
};
struct CUevent_st {
    cudaStream_t stream = nullptr;
    Clock::time_point time;
};

namespace {

constexpr size_t kPage = 4096, kAlignment = 256;

/// Pages of their own, between pages that nobody may touch; the bytes are at their end.
struct Allocation {
    char* pages;
    size_t page_bytes, bytes;
    int device;
};
// Guarded by cuda_host::all.
std::map<char*, Allocation> device_memory;
std::map<char*, size_t> pinned;
std::set<cudaStream_t> streams;
CUstream_st default_stream;
int drains = 0;  // running streams now

size_t used_memory() {
    size_t used = 0;
    for (const auto& [p, allocation] : device_memory) used += allocation.bytes;
    return used;
}

CUstream_st& stream_of(cudaStream_t stream) { return stream ? *stream : default_stream; }

bool is_stream(cudaStream_t stream) { return stream == nullptr || streams.contains(stream); }

/// Device memory is there for what streams run, and for nobody else.
void let_touch(bool yes) {
    for (const auto& [p, allocation] : device_memory)
        mprotect(allocation.pages, allocation.page_bytes, yes ? PROT_READ | PROT_WRITE : PROT_NONE);
}

void drain(CUstream_st& stream) {
    if (stream.queue.empty()) return;
    if (drains++ == 0) let_touch(true);
    for (const Work& work : std::exchange(stream.queue, {})) work();
    if (--drains == 0) let_touch(false);
}

void drain_all() {
    drain(default_stream);
    for (const cudaStream_t stream : streams) drain(*stream);
}

/// The default stream comes after all that blocking streams have been given, and they after what it has.
void put_in_order(cudaStream_t handle) {
    if (handle != nullptr && handle->waits_for_default) drain(default_stream);
    if (handle != nullptr) return;
    for (const cudaStream_t stream : streams)
        if (stream->waits_for_default && !stream->capturing) drain(*stream);
}

/// Whether a capture forbids what concerns the whole device.
bool capture_forbids() {
    for (const cudaStream_t stream : streams)
        if (stream->capturing && stream->mode != cudaStreamCaptureModeRelaxed) return true;
    return false;
}

/// Whether these bytes are all in one allocation.
template <class Map, class Bytes>
bool inside(const Map& map, const void* p, size_t bytes, Bytes&& bytes_of) {
    char* const first = static_cast<char*>(const_cast<void*>(p));
    const auto next = map.upper_bound(first);
    if (next == map.begin()) return false;
    const auto& [start, allocation] = *std::prev(next);
    return first + bytes <= start + bytes_of(allocation);
}
bool on_device(const void* p, size_t bytes) {
    return inside(device_memory, p, bytes, [](const Allocation& allocation) { return allocation.bytes; });
}
bool is_pinned(const void* p, size_t bytes) {
    return inside(pinned, p, bytes, [](size_t size) { return size; });
}

bool fits_kind(const void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    if (kind == cudaMemcpyDefault) return true;
    const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    return on_device(to, bytes) == to_device && on_device(from, bytes) == from_device;
}

}  // namespace

cudaError_t cuda_host::enqueue(cudaStream_t handle, Work work, bool early) {
    if (!is_stream(handle)) return result(cudaErrorInvalidResourceHandle);
    CUstream_st& stream = stream_of(handle);
    if (handle != nullptr && stream.device != current_device) return result(cudaErrorInvalidResourceHandle);
    if (handle == nullptr && capture_forbids()) return result(cudaErrorStreamCaptureUnsupported);
    if (stream.capturing && early && refused_graphs() == RefusedGraphs::early) {
        stream.invalidated = true;
        return result(cudaErrorStreamCaptureUnsupported);
    }
    if (!stream.capturing) put_in_order(handle);
    (stream.capturing ? stream.captured : stream.queue).push_back(std::move(work));
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    const Lock lock(all);
    *total = total_memory();
    // The rest of an integrated one's is full of cached files, which an allocation takes away.
    *free = is_integrated() ? 0 : *total - std::min(*total, used_memory());
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
    const Lock lock(all);
    if (capture_forbids()) return result(cudaErrorStreamCaptureUnsupported);
    drain_all();
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    const Lock lock(all);
    *stream = new CUstream_st{.waits_for_default = flags != cudaStreamNonBlocking, .device = current_device};
    streams.insert(*stream);
    ++n_streams;
    return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
    return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    const Lock lock(all);
    if (stream == nullptr || !is_stream(stream)) return result(cudaErrorInvalidResourceHandle);
    drain(*stream);
    streams.erase(stream);
    --n_streams;
    delete stream;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    const Lock lock(all);
    if (!is_stream(stream)) return result(cudaErrorInvalidResourceHandle);
    if (stream_of(stream).capturing) return result(cudaErrorStreamCaptureUnsupported);
    put_in_order(stream);
    drain(stream_of(stream));
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) { return cudaStreamSynchronize(stream); }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    *event = new CUevent_st;
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    const Lock lock(all);
    event->stream = stream;
    return enqueue(stream, [event] { event->time = Clock::now(); });
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return cudaStreamSynchronize(event->stream); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    const Lock lock(all);
    if (is_stream(event->stream)) drain(stream_of(event->stream));  // who has it still to record
    delete event;
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
    *milliseconds = std::chrono::duration<float, std::milli>(end->time - start->time).count();
    return cudaSuccess;
}

cudaError_t cudaMalloc(void** p, size_t bytes) {
    const Lock lock(all);
    *p = nullptr;
    if (capture_forbids()) return result(cudaErrorStreamCaptureUnsupported);
    if (bytes == 0) return cudaSuccess;
    const size_t total = total_memory(), used = used_memory();
    if (used > total || bytes > total - used) return result(cudaErrorMemoryAllocation);
    const size_t page_bytes = (bytes + kAlignment - 1 + kPage - 1) / kPage * kPage;
    void* const memory =
        mmap(nullptr, page_bytes + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return result(cudaErrorMemoryAllocation);
    char* const pages = static_cast<char*>(memory) + kPage;
    char* const first = pages + (page_bytes - bytes) / kAlignment * kAlignment;
    mprotect(pages, page_bytes, PROT_READ | PROT_WRITE);
    std::memset(pages, 0xff, page_bytes);
    if (drains == 0) mprotect(pages, page_bytes, PROT_NONE);
    if (__asan_poison_memory_region) {
        __asan_poison_memory_region(pages, first - pages);
        __asan_poison_memory_region(first + bytes, pages + page_bytes - (first + bytes));
    }
    device_memory[first] = {pages, page_bytes, bytes, current_device};
    *p = first;
    return cudaSuccess;
}

cudaError_t cudaFree(void* p) {
    const Lock lock(all);
    if (p == nullptr) return cudaSuccess;
    if (capture_forbids()) return result(cudaErrorStreamCaptureUnsupported);
    const auto found = device_memory.find(static_cast<char*>(p));
    if (found == device_memory.end()) return result(cudaErrorInvalidValue);
    drain_all();
    const Allocation allocation = found->second;
    n_freed_elsewhere += allocation.device != current_device;
    if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(allocation.pages, allocation.page_bytes);
    munmap(allocation.pages - kPage, allocation.page_bytes + 2 * kPage);
    device_memory.erase(found);
    return cudaSuccess;
}

cudaError_t cudaMallocHost(void** p, size_t bytes) {
    const Lock lock(all);
    *p = std::malloc(bytes);
    if (*p == nullptr) return result(cudaErrorMemoryAllocation);
    pinned[static_cast<char*>(*p)] = bytes;
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void* p) {
    const Lock lock(all);
    drain_all();
    if (p != nullptr && pinned.erase(static_cast<char*>(p)) == 0) return result(cudaErrorInvalidValue);
    std::free(p);
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* p) {
    const Lock lock(all);
    attributes->type = on_device(p, 1)   ? cudaMemoryTypeDevice
                       : is_pinned(p, 1) ? cudaMemoryTypeHost
                                         : cudaMemoryTypeUnregistered;
    return cudaSuccess;
}

/// Host memory is read when the copy runs, as may be even if it is not pinned: where a device reads it by the
/// host's page tables. What is copied to host memory that is not pinned is there when this returns.
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
    const Lock lock(all);
    if (bytes == 0) return cudaSuccess;
    if (!fits_kind(to, from, bytes, kind)) return result(cudaErrorInvalidValue);
    const bool waits = !on_device(to, bytes) && !is_pinned(to, bytes);
    if (!on_device(from, bytes)) ++n_uploads;
    if (!on_device(to, bytes)) n_bytes_down += bytes;
    const cudaError_t done = enqueue(stream, [=] { std::memmove(to, from, bytes); });
    if (done != cudaSuccess || stream_of(stream).capturing) return done;
    return waits ? cudaStreamSynchronize(stream) : done;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    const cudaError_t error = cudaMemcpyAsync(to, from, bytes, kind, nullptr);
    return error == cudaSuccess ? cudaStreamSynchronize(nullptr) : error;
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
    const Lock lock(all);
    if (bytes == 0) return cudaSuccess;
    if (!on_device(to, bytes)) return result(cudaErrorInvalidValue);
    return enqueue(stream, [=] {
        ++n_started;
        std::memset(to, value, bytes);
    });
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
    return cudaMemsetAsync(to, value, bytes, nullptr);
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
    const Lock lock(all);
    if (stream == nullptr) return result(cudaErrorStreamCaptureUnsupported);
    if (!is_stream(stream) || stream->capturing) return result(cudaErrorInvalidValue);
    stream->capturing = true;
    stream->mode = mode;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    const Lock lock(all);
    if (stream == nullptr || !is_stream(stream) || !stream->capturing) return result(cudaErrorInvalidValue);
    stream->capturing = false;
    *graph = nullptr;
    std::vector<Work> nodes = std::exchange(stream->captured, {});
    if (std::exchange(stream->invalidated, false)) return result(cudaErrorStreamCaptureInvalidated);
    *graph = new CUgraph_st{std::move(nodes)};
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    const Lock lock(all);
    if (!is_stream(stream)) return result(cudaErrorInvalidResourceHandle);
    *status = stream_of(stream).capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
    const Lock lock(all);
    if (refused_graphs() == RefusedGraphs::all) return result(cudaErrorMemoryAllocation);
    *exec = new CUgraphExec_st{graph->nodes};
    ++n_graphs;
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    const Lock lock(all);
    return enqueue(stream, [nodes = exec->nodes] {
        for (const Work& node : nodes) node();
    });
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    const Lock lock(all);
    --n_graphs;
    return delete exec, cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return delete graph, cudaSuccess; }

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
    if (nodes != nullptr) return result(cudaErrorInvalidValue);
    return *count = graph->nodes.size(), cudaSuccess;
}
