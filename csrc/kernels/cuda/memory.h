// Memory of one CUDA device: counted, zeroed, in slabs where it is small.
#pragma once

#include <memory>

#include "kernels/backend.h"
#include "kernels/cuda/device.h"

namespace slimrt::cuda {

/// Bytes of a device's memory, which is current.
struct DeviceMemory {
    uint64_t available, total;
};
DeviceMemory memory_of(const Device& device);

class Memory {
  public:
    /// For a device without a stream (planning) nothing is allocated: addresses are made up and counted.
    explicit Memory(const Device& device) : device_(device), used_(std::make_shared<MemoryUse>()) {}

    /// Throws Error{wont_fit}. `what` is for the message.
    Buffer alloc(MemoryKind kind, size_t bytes, const char* what);
    MemoryUse used() const { return *used_; }

  private:
    std::shared_ptr<std::byte> take(size_t bytes, const char* what);
    std::shared_ptr<std::byte> take_whole(size_t bytes, const char* what) const;

    const Device& device_;
    std::shared_ptr<MemoryUse> used_;  // outlives the backend when a buffer does
    std::shared_ptr<std::byte> slab_;
    size_t slab_used_ = 0;
    uintptr_t next_ = uintptr_t(1) << 20;  // planning
};

}  // namespace slimrt::cuda
