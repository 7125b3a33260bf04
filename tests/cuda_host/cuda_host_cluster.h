// The threads of a launch that are running, as threads.cpp and copies.cpp share them.
#pragma once

#include <array>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "cuda_host_fibers.h"
#include "cuda_host_threads.h"

namespace cuda_host {

inline constexpr int kLanes = 32;

struct Block;

struct Copy {
    void* to = nullptr;
    const void* from = nullptr;  // nullptr: zeros, or `words`
    size_t bytes = 0;
    uint64_t* barrier = nullptr;  // that is told when the copy is there: of so many bytes, of an arrival
    uint32_t told_bytes = 0, told_arrivals = 0;
    const Block* block = nullptr;  // whose copy that is
    bool stored = false;           // of words
    std::array<unsigned char, 16> words{};
};

struct Block {
    uint3 index;
    std::unique_ptr<unsigned char, decltype(&std::free)> shared{nullptr, &std::free};
    int live = 0, at_barrier = 0;
    void* copier = nullptr;  // known to cuda_host_races.h as who makes its copies in the background
};

struct Thread {
    Fiber fiber;
    Block* block = nullptr;
    int number = 0;  // in the block
    uint3 index{};
    bool exited = false, in_turn = false;  // in_turn: it has waited for the kernel before
    Thread* first = nullptr;               // of the warp
    uint32_t live = 0,
             meeting =
                 0;  // of a first thread: the warp's lanes that have not exited, that are in a collective
    const char* waits_for = nullptr;  // nullptr: can go on
    Collective* collective = nullptr;
    uint64_t* barrier = nullptr;
    uint32_t parity = 0;
    const uint32_t* count = nullptr;
    uint32_t wanted = 0;
    std::vector<std::vector<Copy>> groups{1};  // the last one is open
};

inline constexpr size_t kMostBlocks = 64;

/// The cluster that is running, or the blocks.
struct Cluster {
    const Launch* launch = nullptr;
    unsigned threads = 0;                      // of a block
    uint64_t next = 0;                         // block of the launch
    std::vector<Block> blocks;                 // stay where they are: room for all is kept
    std::vector<std::unique_ptr<Thread>> all;  // block after block; more than there are threads
    std::vector<Thread*> ready;
    size_t live = 0, at_barrier = 0;
    char began = 0, ended = 0;   // addresses for cuda_host_races.h
    std::vector<void*> copiers;  // of blocks; more than there are
    std::vector<Copy> bulk;
    std::minstd_rand chance;

    Thread* current = nullptr;

    Thread* warp_of(const Thread& thread, int lane) {
        const size_t number = thread.number / kLanes * kLanes + lane;
        return number < threads ? all[(thread.block - blocks.data()) * threads + number].get() : nullptr;
    }
    size_t n_threads() const { return blocks.size() * threads; }
};
extern Cluster cluster;

/// What threads wait for: told apart by address.
inline constexpr char kBlockBarrier[] = "__syncthreads", kClusterBarrier[] = "cluster_sync",
                      kCountingBarrier[] = "barrier_wait", kCount[] = "count_wait";

/// Lets a thread go on that waited.
void release(Thread& thread);
/// Lets others run until somebody has released this thread.
void pause();
void wait_for(const char* what);

/// Delivers what comes to this barrier of shared memory; whether the phase of this parity has ended.
bool has_ended(uint64_t* barrier, uint32_t parity);

}  // namespace cuda_host
