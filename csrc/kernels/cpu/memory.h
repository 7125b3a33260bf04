// Memory of the CPU backend: counted, zeroed and resident.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/tensor.h"
#include "core/thread_pool.h"
#include "kernels/backend.h"

namespace slimrt::cpu {

class Memory {
  public:
    /// Without a pool (the planner) it is counted alone, at addresses that must not be used.
    explicit Memory(ThreadPool* pool) : pool_(pool), used_(std::make_shared<Counters>()) {}

    /// Throws Error{wont_fit}. `what` is for the message.
    Buffer alloc(MemoryKind kind, size_t bytes, const char* what);
    MemoryUse used() const;

  private:
    struct Counters {  // outlives the backend when a buffer does
        std::atomic<uint64_t> bytes[4] = {};
        uint64_t planned = 0;  // addresses that were given out, in one thread
    };
    Buffer planned(MemoryKind kind, size_t bytes, const char* what);
    void touch(std::byte* data, size_t bytes);

    ThreadPool* pool_;
    std::shared_ptr<Counters> used_;
};

}  // namespace slimrt::cpu
