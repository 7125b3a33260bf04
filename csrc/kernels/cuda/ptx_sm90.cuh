// The same for sm_90a alone: clusters of blocks that read each other's shared memory, barriers that count
// bytes, bulk copies. For units that are compiled for no other architecture.
#pragma once

#include "kernels/cuda/ptx.cuh"

namespace slimrt::cuda {

__device__ inline uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
/// Waits for all threads of the cluster; what they wrote to each other's shared memory is there.
__device__ inline void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}
/// Where the same variable of block `rank` of the cluster is.
template <class T>
__device__ inline T* shared_of(T* own, uint32_t rank) {
    uint64_t there;
    asm volatile("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(reinterpret_cast<uint64_t>(own)), "r"(rank));
    return reinterpret_cast<T*>(there);
}

// What barriers (ptx.cuh) can do besides: a phase ends when all have arrived and all expected bytes are
// there.

/// Makes initialised barriers known to copies and to the cluster; then cluster_sync().
__device__ inline void barrier_init_done() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void barrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}
/// Arrives at the barrier of another block of the cluster; `barrier` as shared_of() gives it.
__device__ inline void barrier_arrive_remote(uint64_t* barrier) {
    asm volatile(
        "{\n.reg .u64 there;\ncvta.to.shared::cluster.u64 there, %0;\n"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n}" ::"l"(barrier)
        : "memory");
}
/// barrier_wait(), which sees what the block's own threads and copies have released.
__device__ inline void barrier_wait_block(uint64_t* barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}
/// The same that sees what remote arrivals released. It throws the first-level cache away (CCTL.IVALL).
__device__ inline void barrier_wait_cluster(uint64_t* barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

/// Copies bytes (a multiple of 16, both addresses too) from global to this block's shared memory and counts
/// them at the barrier.
__device__ inline void copy_bulk(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(shared)),
        "l"(global), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
}

}  // namespace slimrt::cuda
