// Copies to the device whose source may change at once, and copies from it.
#pragma once

#include "kernels/cuda/device.h"

namespace slimrt::cuda {

class Staging {
  public:
    explicit Staging(const Device& device) : device_(device) {}
    ~Staging();
    Staging(const Staging&) = delete;
    Staging& operator=(const Staging&) = delete;

    /// From host or device memory to device memory, in the stream's order. Throws Error{device}.
    void copy(void* to, const void* from, size_t bytes);
    /// From device to host memory, complete on return; a little (tokens, say) goes by way of pinned memory,
    /// which a device writes without the driver's help. Throws Error{device}.
    void fetch(void* to, const void* from, size_t bytes);
    /// Waits until the stream is done. Throws Error{device}.
    void wait();

  private:
    static constexpr size_t kBytes = size_t(1) << 20, kAlign = 64, kFetched = size_t(16) << 10;

    /// Pinned memory that is free until the next wait().
    std::byte* take(size_t bytes);

    const Device& device_;
    std::byte* pinned_ = nullptr;
    size_t used_ = 0;  // by copies that may not have run
};

}  // namespace slimrt::cuda
