// The threads of a cluster as fibers: each runs until it waits; when none can go on, the launch is dead. Of a
// launch without clusters more blocks are started when one waits for what others write to device memory.
#include <algorithm>
#include <bit>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <typeinfo>
#include <vector>

#include "cuda_host_fibers.h"
#include "cuda_host_races.h"
#include "cuda_host_threads.h"

namespace cuda_host {
namespace {

constexpr int kLanes = 32;

struct Block;

struct Copy {
    void* to = nullptr;
    const void* from = nullptr;  // nullptr: zeros
    size_t bytes = 0;
    uint64_t* barrier = nullptr;  // that is told when the copy is there: of so many bytes, of an arrival
    uint32_t told_bytes = 0, told_arrivals = 0;
    const Block* block = nullptr;  // whose copy that is
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
    bool exited = false;
    const char* waits_for = nullptr;  // nullptr: can go on
    Collective* collective = nullptr;
    uint64_t* barrier = nullptr;
    uint32_t parity = 0;
    const uint32_t* count = nullptr;
    uint32_t wanted = 0;
    std::vector<std::vector<Copy>> groups{1};  // the last one is open
};

constexpr size_t kMostBlocks = 64;

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
Cluster cluster;

std::string place(const uint3& at) {
    return "(" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " + std::to_string(at.z) + ")";
}

void release(Thread& thread) {
    thread.waits_for = nullptr;
    cluster.ready.push_back(&thread);
}

/// What each of them has done comes before what any does from now on.
void order(const std::vector<Thread*>& threads) {
    if (!races::are_found() || threads.empty()) return;
    void* const current = races::this_thread();
    for (const auto ordered : {races::ordered_before, races::ordered_after})
        for (Thread* const thread : threads) {
            races::become(thread->fiber.known_as);
            ordered(threads.front());
        }
    races::become(current);
}

/// Lets those go on who wait for `what` in this block, or in all blocks.
void release_all(const char* what, const Block* of) {
    std::vector<Thread*> there;
    for (size_t i = 0; i < cluster.n_threads(); ++i) {
        Thread& thread = *cluster.all[i];
        if (thread.waits_for == what && (of == nullptr || thread.block == of)) there.push_back(&thread);
    }
    order(there);
    for (Thread* const thread : there) release(*thread);
}

constexpr char kBlockBarrier[] = "__syncthreads", kClusterBarrier[] = "cluster_sync",
               kCountingBarrier[] = "barrier_wait", kCount[] = "count_wait";

void check_block_barrier(Block& block) {
    if (block.at_barrier == 0 || block.at_barrier < block.live) return;
    block.at_barrier = 0;
    release_all(kBlockBarrier, &block);
}

void check_cluster_barrier() {
    if (cluster.at_barrier == 0 || cluster.at_barrier < cluster.live) return;
    cluster.at_barrier = 0;
    release_all(kClusterBarrier, nullptr);
}

/// Runs the collective that this lane waits in if everybody is there.
void try_collective(Thread& thread) {
    Collective& call = *thread.collective;
    Collective* calls[kLanes] = {};
    for (int i = 0; i < kLanes; ++i) {
        Thread* const other = call.mask >> i & 1 ? cluster.warp_of(thread, i) : nullptr;
        if (other == nullptr || other->exited) continue;
        if (other->collective == nullptr || other->collective->mask != call.mask) return;
        if (typeid(*other->collective) != typeid(call)) return;
        calls[i] = other->collective;
    }
    call.run(calls);
    std::vector<Thread*> there;
    for (int i = 0; i < kLanes; ++i)
        if (calls[i] != nullptr) there.push_back(cluster.warp_of(thread, i));
    if (call.orders) order(there);
    for (Thread* const other : there) {
        other->collective = nullptr;
        if (other != cluster.current) release(*other);
    }
}

void exit_thread(Thread& thread) {
    const races::Unwatched own;
    thread.exited = true;
    --cluster.live;
    --thread.block->live;
    check_block_barrier(*thread.block);
    check_cluster_barrier();
    for (int i = 0; i < kLanes; ++i) {
        Thread* const other = cluster.warp_of(thread, i);
        if (other && other->collective) try_collective(*other);
    }
}

/// Lets others run until somebody has released this thread.
void pause() { stop(cluster.current->fiber); }

void wait_for(const char* what) {
    cluster.current->waits_for = what;
    pause();
}

void thread_main() {
    started();
    races::ordered_after(&cluster.began);
    cluster.launch->kernel();
    races::ordered_before(&cluster.ended);
    exit_thread(*cluster.current);
    stop_for_good(cluster.current->fiber);
}

/// Until it waits or exits.
void go_on(Thread& thread) {
    cluster.current = &thread;
    threadIdx = thread.index;
    blockIdx = thread.block->index;
    resume(thread.fiber);
    cluster.current = nullptr;
}

void make_thread(Thread& thread, Block& block, unsigned number) {
    if (!prepare(thread.fiber, thread_main)) die("no memory for the stacks of the threads");
    const dim3 size = cluster.launch->block;
    thread.block = &block;
    thread.number = int(number);
    thread.index = {number % size.x, number / size.x % size.y, number / size.x / size.y};
    thread.exited = false;
    thread.groups.assign(1, {});
    release(thread);
}

void deliver(const Copy& copy) {
    const races::Unwatched own;
    if (copy.bytes == 0) return;
    copy.from ? std::memcpy(copy.to, copy.from, copy.bytes) : std::memset(copy.to, 0, copy.bytes);
}

/// Tells cuda_host_races.h.
void show(const Copy& copy) {
    if (copy.from) races::reads(copy.from, copy.bytes);
    if (copy.bytes > 0) races::writes(copy.to, copy.bytes);
}

// A counting barrier is a word of shared memory; while no block has initialised it, it is NaN like the rest.
struct Counting {
    uint64_t bytes : 24;  // to come, modulo 2^24
    uint64_t arrivals : 16, left : 16;
    uint64_t parity : 1, unused : 7;
};

Counting read(const uint64_t* barrier, const char* what) {
    const auto counting = std::bit_cast<Counting>(*barrier);
    if (counting.unused != 0) die("%s: the barrier has not been initialised", what);
    return counting;
}

void write(uint64_t* barrier, Counting counting) {
    if (counting.left == 0 && counting.bytes == 0) {
        counting.left = counting.arrivals;
        counting.parity ^= 1;
    }
    *barrier = std::bit_cast<uint64_t>(counting);
}

/// An address for cuda_host_races.h.
const void* phase_of(const uint64_t* barrier, uint32_t parity) {
    return reinterpret_cast<const char*>(barrier) + parity;
}

/// The accesses come after what the block's threads did before they began copies, and before the phase ends.
void show_in_background(const Copy& copy, const void* phase) {
    void* const current = races::this_thread();
    races::become(copy.block->copier);
    races::ordered_after(copy.block);
    show(copy);
    races::ordered_before(phase);
    races::become(current);
}

/// Delivers what comes to this barrier; whether the phase of this parity has ended.
bool has_ended(uint64_t* barrier, uint32_t parity) {
    const races::Unwatched own;
    std::erase_if(cluster.bulk, [barrier](const Copy& copy) {
        if (copy.barrier != barrier) return false;
        Counting counting = read(barrier, "copy_bulk");
        show_in_background(copy, phase_of(barrier, counting.parity));
        deliver(copy);
        counting.bytes -= copy.told_bytes;
        counting.left -= copy.told_arrivals;
        write(barrier, counting);
        return true;
    });
    return read(barrier, kCountingBarrier).parity != parity;
}

/// Whether somebody who waits for copies, arrivals at a counting barrier or a count can go on now.
bool poll() {
    for (size_t i = 0; i < cluster.n_threads(); ++i) {
        Thread& thread = *cluster.all[i];
        if ((thread.waits_for == kCountingBarrier && has_ended(thread.barrier, thread.parity)) ||
            (thread.waits_for == kCount && *thread.count >= thread.wanted))
            release(thread);
    }
    return !cluster.ready.empty();
}

bool somebody_waits_for_a_count() {
    for (size_t i = 0; i < cluster.n_threads(); ++i)
        if (cluster.all[i]->waits_for == kCount) return true;
    return false;
}

[[noreturn]] void report_deadlock() {
    std::map<std::string, std::string> waiting;  // the threads of each block and reason
    for (size_t i = 0; i < cluster.n_threads(); ++i) {
        const Thread& thread = *cluster.all[i];
        if (thread.exited) continue;
        char mask[40] = "";
        if (thread.collective) std::snprintf(mask, sizeof mask, " of lanes %#x", thread.collective->mask);
        std::string& threads =
            waiting["block " + place(thread.block->index) + " in " + thread.waits_for + mask];
        threads += (threads.empty() ? "" : " ") + std::to_string(thread.number);
    }
    std::fprintf(stderr, "cuda_host: deadlock, %zu of %zu threads have exited\n",
                 cluster.n_threads() - cluster.live, cluster.n_threads());
    for (const auto& [where, threads] : waiting)
        std::fprintf(stderr, "  %s: threads %s\n", where.c_str(), threads.c_str());
    std::abort();
}

bool there_are_more() { return cluster.next < uint64_t{gridDim.x} * gridDim.y * gridDim.z; }

/// The next block of the launch begins.
void start_block() {
    const uint64_t i = cluster.next++;
    cluster.blocks.push_back({.index = {unsigned(i % gridDim.x), unsigned(i / gridDim.x % gridDim.y),
                                        unsigned(i / gridDim.x / gridDim.y)},
                              .live = int(cluster.threads)});
    Block& block = cluster.blocks.back();
    while (cluster.copiers.size() < cluster.blocks.size()) cluster.copiers.push_back(races::make_thread());
    block.copier = cluster.copiers[cluster.blocks.size() - 1];
    void* memory = nullptr;
    const size_t bytes = cluster.launch->shared_bytes;
    if (bytes > 0 && posix_memalign(&memory, 1024, bytes) != 0) die("no memory for shared memory");
    if (memory) std::memset(memory, 0xff, bytes);
    block.shared.reset(static_cast<unsigned char*>(memory));
    cluster.live += cluster.threads;
    const size_t first = cluster.n_threads() - cluster.threads;
    while (cluster.all.size() < cluster.n_threads()) cluster.all.push_back(std::make_unique<Thread>());
    for (unsigned i = 0; i < cluster.threads; ++i) make_thread(*cluster.all[first + i], block, i);
    races::ordered_before(&cluster.began);
}

/// Blocks that wait for others that have not begun: those begin, as on a device with room for them.
bool start_more() {
    if (cluster.launch->cluster > 1 || !there_are_more() || !somebody_waits_for_a_count()) return false;
    if (cluster.blocks.size() == kMostBlocks) die("more than %zu blocks wait for each other", kMostBlocks);
    start_block();
    return true;
}

void run_cluster() {
    cluster.live = cluster.at_barrier = 0;
    cluster.ready.clear();
    cluster.blocks.clear();
    for (unsigned rank = 0; rank < cluster.launch->cluster; ++rank) start_block();
    while (cluster.live > 0) {
        if (cluster.ready.empty() && !poll() && !start_more()) report_deadlock();
        std::swap(cluster.ready[cluster.chance() % cluster.ready.size()], cluster.ready.back());
        Thread& next = *cluster.ready.back();
        cluster.ready.pop_back();
        go_on(next);
    }
    races::ordered_after(&cluster.ended);
    if (!cluster.bulk.empty()) die("blocks end with copies that nobody has waited for");
}

}  // namespace

void die(const char* format, ...) {
    if (cluster.current)
        std::fprintf(stderr, "cuda_host: block %s, thread %s: ", place(cluster.current->block->index).c_str(),
                     place(cluster.current->index).c_str());
    va_list values;
    va_start(values, format);
    std::vfprintf(stderr, format, values);
    va_end(values);
    std::fputc('\n', stderr);
    std::abort();
}

void require_aligned(const void* p, const char* what) {
    if (reinterpret_cast<uintptr_t>(p) % 16 != 0) die("%s: %p is no multiple of 16", what, p);
}

void meet(Collective& call) {
    const races::Unwatched own;
    Thread& thread = *cluster.current;
    if (!(call.mask >> thread.number % kLanes & 1))
        die("%s: the lane is not in its mask %#x", call.name, call.mask);
    thread.collective = &call;
    try_collective(thread);
    if (thread.collective) wait_for(call.name);
}

void sync_block() {
    const races::Unwatched own;
    Block& block = *cluster.current->block;
    cluster.current->waits_for = kBlockBarrier;
    ++block.at_barrier;
    check_block_barrier(block);
    pause();
}

void sync_cluster() {
    const races::Unwatched own;
    cluster.current->waits_for = kClusterBarrier;
    ++cluster.at_barrier;
    check_cluster_barrier();
    pause();
}

unsigned char* shared_memory() { return cluster.current->block->shared.get(); }

unsigned cluster_rank() { return unsigned(cluster.current->block - cluster.blocks.data()); }

void* shared_of(const void* own, unsigned rank) {
    const size_t offset = static_cast<const unsigned char*>(own) - shared_memory();
    if (offset >= cluster.launch->shared_bytes) die("shared_of: not in the block's dynamic shared memory");
    if (rank >= cluster.blocks.size())
        die("shared_of: block %u of a cluster of %zu", rank, cluster.blocks.size());
    return cluster.blocks[rank].shared.get() + offset;
}

void copy_later(void* to, const void* from, size_t bytes) {
    require_aligned(to, "copy16");
    require_aligned(from, "copy16");
    if (bytes > 16) die("copy16: %zu bytes", bytes);
    races::writes(to, 16);
    const races::Unwatched own;
    std::memset(to, 0xff, 16);
    auto& group = cluster.current->groups.back();
    group.push_back({to, from, bytes});
    if (bytes < 16) group.push_back({static_cast<char*>(to) + bytes, nullptr, 16 - bytes});
}

void end_copy_group() { cluster.current->groups.emplace_back(); }

void finish_copies(unsigned groups_left) {
    auto& groups = cluster.current->groups;
    while (groups.size() > groups_left + 1) {
        for (const Copy& copy : groups.front()) {
            show(copy);
            deliver(copy);
        }
        groups.erase(groups.begin());
    }
}

void barrier_init(uint64_t* barrier, uint32_t arrivals) {
    if (arrivals == 0 || arrivals > 0xffff) die("barrier_init: %u arrivals", arrivals);
    *barrier = std::bit_cast<uint64_t>(Counting{0, arrivals, arrivals, 0, 0});
}

void barrier_arrive(uint64_t* barrier, uint32_t expected_bytes) {
    Counting counting = read(barrier, "barrier_arrive");
    races::ordered_before(phase_of(barrier, counting.parity));
    if (counting.left == 0) die("barrier_arrive: more arrivals than the barrier was initialised with");
    counting.bytes += expected_bytes;
    --counting.left;
    write(barrier, counting);
}

void barrier_wait(uint64_t* barrier, uint32_t parity) {
    if (!has_ended(barrier, parity)) {
        cluster.current->barrier = barrier;
        cluster.current->parity = parity;
        wait_for(kCountingBarrier);
    }
    races::ordered_after(phase_of(barrier, parity));
}

void copy_bulk(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
    require_aligned(to, "copy_bulk");
    require_aligned(from, "copy_bulk");
    if (bytes % 16 != 0) die("copy_bulk: %u bytes are no multiple of 16", bytes);
    read(barrier, "copy_bulk");
    races::writes(to, bytes);
    races::ordered_before(cluster.current->block);
    const races::Unwatched own;
    std::memset(to, 0xff, bytes);
    cluster.bulk.push_back({to, from, bytes, barrier, bytes, 0, cluster.current->block});
}

void arrive_after_copies(uint64_t* barrier) {
    read(barrier, "arrive_after_copies");
    Block* const block = cluster.current->block;
    races::ordered_before(block);
    const races::Unwatched own;
    for (auto& group : cluster.current->groups)
        for (Copy& copy : group) {
            copy.barrier = barrier;
            copy.block = block;
            cluster.bulk.push_back(copy);
        }
    cluster.current->groups.assign(1, {});
    cluster.bulk.push_back({.barrier = barrier, .told_arrivals = 1, .block = block});
}

void wait_for_count(const uint32_t* count, uint32_t wanted) {
    if (*count >= wanted) return;
    cluster.current->count = count;
    cluster.current->wanted = wanted;
    wait_for(kCount);
}

void run(const Launch& launch) {
    const char* const seed = std::getenv("SLIMRT_EMULATED_SEED");
    cluster.chance.seed(seed ? unsigned(std::atoi(seed)) : 1);
    cluster.launch = &launch;
    cluster.threads = launch.block.x * launch.block.y * launch.block.z;
    cluster.blocks.reserve(std::max<size_t>(launch.cluster, kMostBlocks));
    gridDim = launch.grid;
    blockDim = launch.block;
    for (cluster.next = 0; there_are_more();) run_cluster();
    cluster.blocks.clear();
}

}  // namespace cuda_host
