// What the parts of the runtime share.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>

#include "cuda_host_api.h"

namespace cuda_host {

using Work = std::function<void()>;
using Lock = std::lock_guard<std::recursive_mutex>;
inline std::recursive_mutex all;  // of every call that reads or changes what the runtime knows

/// The error itself, which cudaGetLastError() will give too.
cudaError_t result(cudaError_t error);
size_t total_memory();
bool is_integrated();
enum class RefusedGraphs { none, early, all };  // early: of launches that may begin early
RefusedGraphs refused_graphs();
inline thread_local int current_device = 0;
inline cudaLaunchConfig_t last_launch{};  // but for its attributes
inline uint64_t n_started = 0;            // kernels and memsets that have run, those of graphs too
inline int64_t n_graphs = 0;              // that can be started
inline int64_t n_streams = 0;             // that were not destroyed
inline int64_t n_freed_elsewhere = 0;     // allocations, while another device was current
inline uint64_t n_uploads = 0;            // copies from host memory
inline uint64_t n_bytes_down = 0;         // that were copied to host memory
/// To run on the stream after what it has, or to be recorded where the stream is captured.
cudaError_t enqueue(cudaStream_t stream, Work work, bool early = false);

}  // namespace cuda_host
