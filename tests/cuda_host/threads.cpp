// The threads of a cluster as fibers: each runs until it waits; when none can go on, the launch is dead. Of a
// launch without clusters more blocks are started when one waits for what others write to device memory.
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <span>
#include <string>
#include <typeinfo>
#include <vector>

#include "cuda_host_cluster.h"
#include "cuda_host_races.h"

namespace cuda_host {

Cluster cluster;

void release(Thread& thread) {
    thread.waits_for = nullptr;
    cluster.ready.push_back(&thread);
}

namespace {

/// One of those that can go on, which is the current one from now on.
Thread& choose() {
    const size_t chosen = cluster.chance() * uint64_t{cluster.ready.size()} >> 31;  // sooner than by division
    std::swap(cluster.ready[chosen], cluster.ready.back());
    Thread& thread = *cluster.ready.back();
    cluster.ready.pop_back();
    cluster.current = &thread;
    threadIdx = thread.index;
    blockIdx = thread.block->index;
    return thread;
}

}  // namespace

void pause() {
    Thread& own = *cluster.current;
    if (cluster.ready.empty()) return stop(own.fiber);
    Thread& next = choose();
    if (&next != &own) stop_for(own.fiber, next.fiber);
}

void wait_for(const char* what) {
    cluster.current->waits_for = what;
    pause();
}

namespace {

std::string place(const uint3& at) {
    return "(" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " + std::to_string(at.z) + ")";
}

/// What each of them has done comes before what any does from now on.
void order(std::span<Thread* const> threads) {
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

uint32_t lane_of(const Thread& thread) { return uint32_t{1} << thread.number % kLanes; }

/// Runs the collective that this lane waits in if everybody is there.
void try_collective(Thread& thread) {
    Collective& call = *thread.collective;
    const uint32_t wanted = call.mask & thread.first->live;
    if ((thread.first->meeting & wanted) != wanted) return;  // as most often
    Collective* calls[kLanes] = {};
    Thread* there[kLanes];
    size_t n_there = 0;
    for (int i = 0; i < kLanes; ++i) {
        if (!(wanted >> i & 1)) continue;
        Thread* const other = cluster.warp_of(thread, i);
        if (other->collective->mask != call.mask || typeid(*other->collective) != typeid(call)) return;
        calls[i] = other->collective;
        there[n_there++] = other;
    }
    call.run(calls);
    thread.first->meeting &= ~wanted;
    if (call.orders) order({there, n_there});
    for (Thread* const other : std::span(there, n_there)) {
        other->collective = nullptr;
        if (other != cluster.current) release(*other);
    }
}

void exit_thread(Thread& thread) {
    const races::Unwatched own;
    thread.exited = true;
    thread.first->live &= ~lane_of(thread);
    --cluster.live;
    --thread.block->live;
    check_block_barrier(*thread.block);
    check_cluster_barrier();
    for (int i = 0; i < kLanes && thread.first->meeting != 0; ++i) {
        Thread* const other = cluster.warp_of(thread, i);
        if (other && other->collective) try_collective(*other);
    }
}

void thread_main() {
    started();
    races::ordered_after(&cluster.began);
    cluster.launch->kernel();
    if (cluster.launch->early && !cluster.current->in_turn)
        die("a thread of a kernel that may begin early ends without wait_for_previous()");
    races::ordered_before(&cluster.ended);
    exit_thread(*cluster.current);
    stop_for_good(cluster.current->fiber);
}

void make_thread(Thread& thread, Block& block, unsigned number) {
    if (!prepare(thread.fiber, thread_main)) die("no memory for the stacks of the threads");
    const dim3 size = cluster.launch->block;
    thread.block = &block;
    thread.number = int(number);
    thread.index = {number % size.x, number / size.x % size.y, number / size.x / size.y};
    thread.exited = thread.in_turn = false;
    thread.first = cluster.warp_of(thread, 0);
    if (thread.first == &thread) thread.live = thread.meeting = 0;
    thread.first->live |= lane_of(thread);
    thread.groups.assign(1, {});
    release(thread);
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
    if (!cluster.launch->cooperative)
        die("blocks wait for some that may never begin: the launch is not cooperative");
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
        resume(choose().fiber);  // until one exits or none can go on
        cluster.current = nullptr;
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
    thread.first->meeting |= lane_of(thread);
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

void wait_for_previous() { cluster.current->in_turn = true; }

unsigned cluster_rank() { return unsigned(cluster.current->block - cluster.blocks.data()); }

void* shared_of(const void* own, unsigned rank) {
    const size_t offset = static_cast<const unsigned char*>(own) - shared_memory();
    if (offset >= cluster.launch->shared_bytes) die("shared_of: not in the block's dynamic shared memory");
    if (rank >= cluster.blocks.size())
        die("shared_of: block %u of a cluster of %zu", rank, cluster.blocks.size());
    return cluster.blocks[rank].shared.get() + offset;
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
