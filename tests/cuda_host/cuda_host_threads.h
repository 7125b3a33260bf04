// How code that runs as a thread of a block waits for other threads. Implemented in threads.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "cuda_host_vectors.h"

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;
inline constexpr int warpSize = 32;

namespace cuda_host {

/// Prints where in the grid we are and what is wrong there, and aborts.
[[noreturn]] [[gnu::format(printf, 1, 2)]] void die(const char* format, ...);

void require_aligned(const void* p, const char* what);

/// A call that lanes of a warp make together. The last of them runs it for all.
struct Collective {
    Collective(const char* name, unsigned mask, bool orders = false)
        : name(name), mask(mask), orders(orders) {}
    virtual ~Collective() = default;
    /// The calls of the warp's lanes: nullptr where a lane has no part in this or has exited.
    virtual void run(Collective* const* lanes) = 0;

    const char* name;
    unsigned mask;
    bool orders;  // what lanes did before it comes before what any of them does after it
};
/// Returns when all lanes of the mask that have not exited have called it with the same kind and mask.
void meet(Collective& call);

void sync_block();
void sync_cluster();

unsigned char* shared_memory();
/// The same place in the shared memory of block `rank` of the cluster.
void* shared_of(const void* own, unsigned rank);
unsigned cluster_rank();

/// That the kernel before has ended, which it has: kernels run one after the other.
void wait_for_previous();

/// copy16() and its groups, of this thread. from == nullptr: zeros.
/// Sixteen bytes, of which the first `bytes` come from `from` and the rest are zeros.
void copy_later(void* to, const void* from, size_t bytes = 16);
void end_copy_group();
void finish_copies(unsigned groups_left);

void barrier_init(uint64_t* barrier, uint32_t arrivals);
void barrier_arrive(uint64_t* barrier, uint32_t expected_bytes = 0);
void barrier_wait(uint64_t* barrier, uint32_t parity);
void copy_bulk(void* to, const void* from, uint32_t bytes, uint64_t* barrier);
void copy_box(void* to, const void* tensor, const int (&at)[5], uint64_t* barrier);  // tensor_map.cpp
/// At most 16 bytes, of which a barrier is told when they are there.
void store_later(void* to, const void* words, uint32_t bytes, uint64_t* barrier);
/// An arrival when all copies that this thread has begun are there.
void arrive_after_copies(uint64_t* barrier);
/// Until a word of device memory is at least `wanted`. Other blocks may have to write it: they are started.
void wait_for_count(const uint32_t* count, uint32_t wanted);

struct Launch {
    dim3 grid, block;
    unsigned cluster = 1;  // along x
    size_t shared_bytes = 0;
    std::function<void()> kernel;
    bool cooperative = false;  // blocks may wait for others
    bool early = false;        // threads wait for the kernel before, which has ended here
};
/// Runs every thread of every block.
void run(const Launch& launch);

}  // namespace cuda_host
