// The twin of csrc/kernels/cuda/ptx_sm90.cuh for the host.
#pragma once

#include "kernels/cuda/ptx.cuh"

namespace slimrt::cuda {

inline uint32_t cluster_rank() { return cuda_host::cluster_rank(); }
inline void cluster_sync() { cuda_host::sync_cluster(); }
template <class T>
inline T* shared_of(T* own, uint32_t rank) {
    return static_cast<T*>(cuda_host::shared_of(own, rank));
}

inline void barrier_init_done() {}
inline void barrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
    cuda_host::barrier_arrive(barrier, bytes);
}
inline void barrier_wait_block(uint64_t* barrier, uint32_t parity) { barrier_wait(barrier, parity); }
inline void store_async(void* own, const uint4& words, uint64_t* barrier, uint32_t rank) {
    cuda_host::store_later(shared_of(own, rank), &words, sizeof words, shared_of(barrier, rank));
}
inline void store_async(void* own, uint32_t word, uint64_t* barrier, uint32_t rank) {
    cuda_host::store_later(shared_of(own, rank), &word, sizeof word, shared_of(barrier, rank));
}
inline void copy_bulk(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
    cuda_host::copy_bulk(shared, global, bytes, barrier);
}
inline void copy_box(void* shared, const void* map, const int (&at)[5], uint64_t* barrier) {
    cuda_host::copy_box(shared, map, at, barrier);
}
inline void fence_copies() {}

}  // namespace slimrt::cuda
