// PTX of sm_90a: clusters of blocks that access each other's shared memory, barriers that count bytes, bulk
// copies (TMA), also of boxes of a tensor. For units that are compiled for no other architecture.
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

// Barriers (ptx.cuh) that also count bytes: a phase ends when all have arrived and all expected bytes are
// there.

/// Makes initialised barriers visible to copies and to the cluster; cluster_sync() must follow.
__device__ inline void barrier_init_done() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void barrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}
/// barrier_wait() that acquires what the block's own threads have released, and all bytes that were counted.
__device__ inline void barrier_wait_block(uint64_t* barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}
/// Stores asynchronously to the same variable of block `rank` of the cluster and counts the bytes at its
/// barrier: without the fence of an arrival that releases (MEMBAR.ALL.GPU), and without one for the waiting
/// thread. `own` is aligned to what is stored.
__device__ inline void store_async(void* own, const uint4& words, uint64_t* barrier, uint32_t rank) {
    asm volatile(
        "{\n.reg .u64 to, told;\nmapa.u64 to, %0, %2;\nmapa.u64 told, %1, %2;\n"
        "cvta.to.shared::cluster.u64 to, to;\ncvta.to.shared::cluster.u64 told, told;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [to], {%3, %4, %5, %6}, [told];\n}" ::
            "l"(own),
        "l"(barrier), "r"(rank), "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w)
        : "memory");
}
__device__ inline void store_async(void* own, uint32_t word, uint64_t* barrier, uint32_t rank) {
    asm volatile(
        "{\n.reg .u64 to, told;\nmapa.u64 to, %0, %2;\nmapa.u64 told, %1, %2;\n"
        "cvta.to.shared::cluster.u64 to, to;\ncvta.to.shared::cluster.u64 told, told;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [to], %3, [told];\n}" ::"l"(own),
        "l"(barrier), "r"(rank), "r"(word)
        : "memory");
}

/// Copies bytes (a multiple of 16, as both addresses) from global to this block's shared memory and counts
/// them at the barrier.
__device__ inline void copy_bulk(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(shared)),
        "l"(global), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
}

/// Copies the box at these coordinates of a tensor (tensor_map.h, in constant memory) to an address that is a
/// multiple of 1024, and counts its bytes at the barrier.
__device__ inline void copy_box(void* shared, const void* map, const int (&at)[5], uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(shared_address(shared)),
        "l"(map), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4]), "r"(shared_address(barrier))
        : "memory");
}
/// Orders this thread's writes to shared memory before copies that others, who know of them, then start.
__device__ inline void fence_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace slimrt::cuda
