// Copies in the background, and the barriers of shared memory that count them and arrivals.
#include <bit>
#include <cstring>

#include "cuda_host_cluster.h"
#include "cuda_host_races.h"

namespace cuda_host {
namespace {

void deliver(const Copy& copy) {
    const races::Unwatched own;
    if (copy.bytes == 0) return;
    const void* const from = copy.stored ? copy.words.data() : copy.from;
    from ? std::memcpy(copy.to, from, copy.bytes) : std::memset(copy.to, 0, copy.bytes);
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

}  // namespace

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

void store_later(void* to, const void* words, uint32_t bytes, uint64_t* barrier) {
    if (bytes > 16 || reinterpret_cast<uintptr_t>(to) % bytes) die("store_async: %u bytes to %p", bytes, to);
    read(barrier, "store_async");
    races::writes(to, bytes);
    races::ordered_before(cluster.current->block);
    const races::Unwatched own;
    std::memset(to, 0xff, bytes);
    Copy copy{.to = to,
              .bytes = bytes,
              .barrier = barrier,
              .told_bytes = bytes,
              .block = cluster.current->block,
              .stored = true};
    std::memcpy(copy.words.data(), words, bytes);
    cluster.bulk.push_back(copy);
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

}  // namespace cuda_host
