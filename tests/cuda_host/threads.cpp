// The threads of a cluster as fibers: each runs until it waits; when none can go on, the launch is dead.
#include <sys/mman.h>

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

#include "cuda_host_threads.h"

/// Saves what a call must keep and where it stands into *from, and goes on where `to` was saved.
extern "C" void cuda_host_switch(void** from, void* to);
#if defined(__x86_64__)
asm(R"(
.text
.globl cuda_host_switch
.type cuda_host_switch, @function
cuda_host_switch:
    push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp
    ret
.size cuda_host_switch, . - cuda_host_switch
)");
constexpr size_t kSaved = 8,
                 kReturn = 6;  // words on the stack (the last keeps it aligned), the address there
#elif defined(__aarch64__)
asm(R"(
.text
.globl cuda_host_switch
.type cuda_host_switch, %function
cuda_host_switch:
    sub sp, sp, #160
    stp x19, x20, [sp]; stp x21, x22, [sp, #16]; stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]; stp x27, x28, [sp, #64]; stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]; stp d10, d11, [sp, #112]; stp d12, d13, [sp, #128]; stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp]; ldp x21, x22, [sp, #16]; ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]; ldp x27, x28, [sp, #64]; ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]; ldp d10, d11, [sp, #112]; ldp d12, d13, [sp, #128]; ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size cuda_host_switch, . - cuda_host_switch
)");
constexpr size_t kSaved = 20, kReturn = 11;
#endif

// Only there under AddressSanitizer, which must know what is a stack.
extern "C" {
[[gnu::weak]] void __sanitizer_start_switch_fiber(void** fake, const void* bottom, size_t size);
[[gnu::weak]] void __sanitizer_finish_switch_fiber(void* fake, const void** bottom, size_t* size);
}

namespace cuda_host {
namespace {

constexpr size_t kStackBytes = 256 << 10, kPage = 4096;
constexpr int kLanes = 32;

struct Copy {
    void* to;
    const void* from;
    size_t bytes;
    uint64_t* barrier;  // of bulk copies
};

struct Block {
    uint3 index;
    unsigned char* shared;
    int live = 0, at_barrier = 0;
};

struct Fiber {
    void* stack = nullptr;  // kept from launch to launch
    void *saved = nullptr, *fake = nullptr;
    Block* block = nullptr;
    int number = 0;  // in the block
    uint3 index{};
    bool exited = false;
    const char* waits_for = nullptr;  // nullptr: can go on
    Collective* collective = nullptr;
    uint64_t* barrier = nullptr;
    uint32_t parity = 0;
    std::vector<std::vector<Copy>> groups{1};  // the last one is open
};

/// The cluster that is running.
struct Cluster {
    const Launch* launch = nullptr;
    unsigned threads = 0;  // of a block
    std::vector<Block> blocks;
    std::vector<std::unique_ptr<Fiber>> fibers;  // block after block; more than there are threads
    std::vector<Fiber*> ready;
    size_t live = 0, at_barrier = 0;
    std::vector<Copy> bulk;
    std::minstd_rand chance;

    Fiber* current = nullptr;
    void *host_saved = nullptr, *host_fake = nullptr;
    const void* host_bottom = nullptr;
    size_t host_size = 0;

    Fiber* warp_of(const Fiber& fiber, int lane) {
        const size_t number = fiber.number / kLanes * kLanes + lane;
        return number < threads ? fibers[(fiber.block - blocks.data()) * threads + number].get() : nullptr;
    }
    size_t n_fibers() const { return blocks.size() * threads; }
};
Cluster cluster;

std::string place(const uint3& at) {
    return "(" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " + std::to_string(at.z) + ")";
}

void release(Fiber& fiber) {
    fiber.waits_for = nullptr;
    cluster.ready.push_back(&fiber);
}

/// Lets those go on who wait for `what` in this block, or in all blocks.
void release_all(const char* what, const Block* of) {
    for (size_t i = 0; i < cluster.n_fibers(); ++i) {
        Fiber& fiber = *cluster.fibers[i];
        if (fiber.waits_for == what && (of == nullptr || fiber.block == of)) release(fiber);
    }
}

constexpr char kBlockBarrier[] = "__syncthreads", kClusterBarrier[] = "cluster_sync",
               kCountingBarrier[] = "barrier_wait";

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
void try_collective(Fiber& fiber) {
    Collective& call = *fiber.collective;
    Collective* calls[kLanes] = {};
    for (int i = 0; i < kLanes; ++i) {
        Fiber* const other = call.mask >> i & 1 ? cluster.warp_of(fiber, i) : nullptr;
        if (other == nullptr || other->exited) continue;
        if (other->collective == nullptr || other->collective->mask != call.mask) return;
        if (typeid(*other->collective) != typeid(call)) return;
        calls[i] = other->collective;
    }
    call.run(calls);
    for (int i = 0; i < kLanes; ++i) {
        if (calls[i] == nullptr) continue;
        Fiber& other = *cluster.warp_of(fiber, i);
        other.collective = nullptr;
        if (&other != cluster.current) release(other);
    }
}

void exit_thread(Fiber& fiber) {
    fiber.exited = true;
    --cluster.live;
    --fiber.block->live;
    check_block_barrier(*fiber.block);
    check_cluster_barrier();
    for (int i = 0; i < kLanes; ++i) {
        Fiber* const other = cluster.warp_of(fiber, i);
        if (other && other->collective) try_collective(*other);
    }
}

/// From a fiber to the scheduler.
void leave(bool for_good = false) {
    Fiber& fiber = *cluster.current;
    if (__sanitizer_start_switch_fiber)
        __sanitizer_start_switch_fiber(for_good ? nullptr : &fiber.fake, cluster.host_bottom,
                                       cluster.host_size);
    cuda_host_switch(&fiber.saved, cluster.host_saved);
    if (__sanitizer_finish_switch_fiber)
        __sanitizer_finish_switch_fiber(fiber.fake, &cluster.host_bottom, &cluster.host_size);
}

void wait_for(const char* what) {
    cluster.current->waits_for = what;
    leave();
}

void fiber_main() {
    if (__sanitizer_finish_switch_fiber)
        __sanitizer_finish_switch_fiber(nullptr, &cluster.host_bottom, &cluster.host_size);
    cluster.launch->kernel();
    exit_thread(*cluster.current);
    leave(true);
}

/// From the scheduler to a fiber, until it waits or exits.
void enter(Fiber& fiber) {
    cluster.current = &fiber;
    threadIdx = fiber.index;
    blockIdx = fiber.block->index;
    if (__sanitizer_start_switch_fiber)
        __sanitizer_start_switch_fiber(&cluster.host_fake, fiber.stack, kStackBytes);
    cuda_host_switch(&cluster.host_saved, fiber.saved);
    if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(cluster.host_fake, nullptr, nullptr);
    cluster.current = nullptr;
}

void make_fiber(Fiber& fiber, Block& block, unsigned number) {
    if (fiber.stack == nullptr) {
        fiber.stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (fiber.stack == MAP_FAILED || mprotect(fiber.stack, kPage, PROT_NONE) != 0)
            die("no memory for the stacks of the threads");
    }
    void** const words = static_cast<void**>(fiber.stack) + kStackBytes / sizeof(void*) - kSaved;
    std::memset(words, 0, kSaved * sizeof(void*));
    words[kReturn] = reinterpret_cast<void*>(fiber_main);
    const dim3 size = cluster.launch->block;
    fiber.saved = words;
    fiber.block = &block;
    fiber.number = int(number);
    fiber.index = {number % size.x, number / size.x % size.y, number / size.x / size.y};
    fiber.exited = false;
    fiber.groups.assign(1, {});
    release(fiber);
}

void deliver(const Copy& copy) {
    copy.from ? std::memcpy(copy.to, copy.from, copy.bytes) : std::memset(copy.to, 0, copy.bytes);
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

/// Delivers what comes to this barrier; whether the phase of this parity has ended.
bool has_ended(uint64_t* barrier, uint32_t parity) {
    std::erase_if(cluster.bulk, [barrier](const Copy& copy) {
        if (copy.barrier != barrier) return false;
        deliver(copy);
        Counting counting = read(barrier, "copy_bulk");
        counting.bytes -= copy.bytes;
        write(barrier, counting);
        return true;
    });
    return read(barrier, kCountingBarrier).parity != parity;
}

/// Whether somebody who waits for copies or arrivals at a counting barrier can go on now.
bool poll_barriers() {
    for (size_t i = 0; i < cluster.n_fibers(); ++i) {
        Fiber& fiber = *cluster.fibers[i];
        if (fiber.waits_for == kCountingBarrier && has_ended(fiber.barrier, fiber.parity)) release(fiber);
    }
    return !cluster.ready.empty();
}

[[noreturn]] void report_deadlock() {
    std::map<std::string, std::string> waiting;  // the threads of each block and reason
    for (size_t i = 0; i < cluster.n_fibers(); ++i) {
        const Fiber& fiber = *cluster.fibers[i];
        if (fiber.exited) continue;
        char mask[40] = "";
        if (fiber.collective) std::snprintf(mask, sizeof mask, " of lanes %#x", fiber.collective->mask);
        std::string& threads =
            waiting["block " + place(fiber.block->index) + " in " + fiber.waits_for + mask];
        threads += (threads.empty() ? "" : " ") + std::to_string(fiber.number);
    }
    std::fprintf(stderr, "cuda_host: deadlock, %zu of %zu threads have exited\n",
                 cluster.n_fibers() - cluster.live, cluster.n_fibers());
    for (const auto& [where, threads] : waiting)
        std::fprintf(stderr, "  %s: threads %s\n", where.c_str(), threads.c_str());
    std::abort();
}

void run_cluster() {
    cluster.live = cluster.at_barrier = 0;
    cluster.ready.clear();
    for (Block& block : cluster.blocks) {
        block.live = int(cluster.threads);
        block.at_barrier = 0;
        if (block.shared) std::memset(block.shared, 0xff, cluster.launch->shared_bytes);
        for (unsigned i = 0; i < cluster.threads; ++i) make_fiber(*cluster.fibers[cluster.live++], block, i);
    }
    while (cluster.live > 0) {
        if (cluster.ready.empty() && !poll_barriers()) report_deadlock();
        std::swap(cluster.ready[cluster.chance() % cluster.ready.size()], cluster.ready.back());
        Fiber& next = *cluster.ready.back();
        cluster.ready.pop_back();
        enter(next);
    }
    if (!cluster.bulk.empty()) die("the cluster ends with bulk copies that nobody has waited for");
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
    Fiber& fiber = *cluster.current;
    if (!(call.mask >> fiber.number % kLanes & 1))
        die("%s: the lane is not in its mask %#x", call.name, call.mask);
    fiber.collective = &call;
    try_collective(fiber);
    if (fiber.collective) wait_for(call.name);
}

void sync_block() {
    Block& block = *cluster.current->block;
    cluster.current->waits_for = kBlockBarrier;
    ++block.at_barrier;
    check_block_barrier(block);
    leave();
}

void sync_cluster() {
    cluster.current->waits_for = kClusterBarrier;
    ++cluster.at_barrier;
    check_cluster_barrier();
    leave();
}

unsigned char* shared_memory() { return cluster.current->block->shared; }

unsigned cluster_rank() { return unsigned(cluster.current->block - cluster.blocks.data()); }

void* shared_of(const void* own, unsigned rank) {
    const size_t offset = static_cast<const unsigned char*>(own) - shared_memory();
    if (offset >= cluster.launch->shared_bytes) die("shared_of: not in the block's dynamic shared memory");
    if (rank >= cluster.blocks.size())
        die("shared_of: block %u of a cluster of %zu", rank, cluster.blocks.size());
    return cluster.blocks[rank].shared + offset;
}

void copy_later(void* to, const void* from) {
    require_aligned(to, "copy16");
    require_aligned(from, "copy16");
    std::memset(to, 0xff, 16);
    cluster.current->groups.back().push_back({to, from, 16, nullptr});
}

void end_copy_group() { cluster.current->groups.emplace_back(); }

void finish_copies(unsigned groups_left) {
    auto& groups = cluster.current->groups;
    while (groups.size() > groups_left + 1) {
        for (const Copy& copy : groups.front()) deliver(copy);
        groups.erase(groups.begin());
    }
}

void barrier_init(uint64_t* barrier, uint32_t arrivals) {
    if (arrivals == 0 || arrivals > 0xffff) die("barrier_init: %u arrivals", arrivals);
    *barrier = std::bit_cast<uint64_t>(Counting{0, arrivals, arrivals, 0, 0});
}

void barrier_arrive(uint64_t* barrier, uint32_t expected_bytes) {
    Counting counting = read(barrier, "barrier_arrive");
    if (counting.left == 0) die("barrier_arrive: more arrivals than the barrier was initialised with");
    counting.bytes += expected_bytes;
    --counting.left;
    write(barrier, counting);
}

void barrier_wait(uint64_t* barrier, uint32_t parity) {
    if (has_ended(barrier, parity)) return;
    cluster.current->barrier = barrier;
    cluster.current->parity = parity;
    wait_for(kCountingBarrier);
}

void copy_bulk(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
    require_aligned(to, "copy_bulk");
    require_aligned(from, "copy_bulk");
    if (bytes % 16 != 0) die("copy_bulk: %u bytes are no multiple of 16", bytes);
    read(barrier, "copy_bulk");
    std::memset(to, 0xff, bytes);
    cluster.bulk.push_back({to, from, bytes, barrier});
}

void run(const Launch& launch) {
    const char* const seed = std::getenv("SLIMRT_EMULATED_SEED");
    cluster.chance.seed(seed ? unsigned(std::atoi(seed)) : 1);
    cluster.launch = &launch;
    cluster.threads = launch.block.x * launch.block.y * launch.block.z;
    cluster.blocks.assign(launch.cluster, {});
    while (cluster.fibers.size() < cluster.n_fibers()) cluster.fibers.push_back(std::make_unique<Fiber>());
    gridDim = launch.grid;
    blockDim = launch.block;
    std::vector<std::unique_ptr<unsigned char, decltype(&std::free)>> shared;
    for (Block& block : cluster.blocks) {
        void* memory = nullptr;
        if (launch.shared_bytes > 0 && posix_memalign(&memory, 1024, launch.shared_bytes) != 0)
            die("no memory for shared memory");
        shared.emplace_back(block.shared = static_cast<unsigned char*>(memory), &std::free);
    }
    for (unsigned z = 0; z < launch.grid.z; ++z)
        for (unsigned y = 0; y < launch.grid.y; ++y)
            for (unsigned x = 0; x < launch.grid.x; x += launch.cluster) {
                for (unsigned rank = 0; rank < launch.cluster; ++rank)
                    cluster.blocks[rank].index = {x + rank, y, z};
                run_cluster();
            }
}

}  // namespace cuda_host
