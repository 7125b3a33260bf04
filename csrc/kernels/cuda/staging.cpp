#include "kernels/cuda/staging.h"

#include <cstring>

namespace slimrt::cuda {

Staging::~Staging() {
    if (pinned_) cudaFreeHost(pinned_);
}

// Of copies from pageable memory CUDA only says that they "might be synchronous": where devices read host
// memory by the host's page tables (Grace) they are not. So small ones go by way of pinned memory, which is
// not used again before the stream was waited for; larger ones are waited for.
void Staging::copy(void* to, const void* from, size_t bytes) {
    cudaPointerAttributes at{};
    check(cudaPointerGetAttributes(&at, from), "asking where memory is");
    const bool on_device = at.type == cudaMemoryTypeDevice, staged = !on_device && bytes <= kBytes;
    if (staged) from = std::memcpy(take(bytes), from, bytes);
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, device_.stream), "copying");
    if (!on_device && !staged) wait();
}

void Staging::fetch(void* to, const void* from, size_t bytes) {
    const bool staged = bytes <= kFetched;
    void* const at = staged ? take(bytes) : to;
    check(cudaMemcpyAsync(at, from, bytes, cudaMemcpyDefault, device_.stream), "copying");
    wait();
    if (staged) std::memcpy(to, at, bytes);
}

std::byte* Staging::take(size_t bytes) {
    if (!pinned_)
        check(cudaMallocHost(reinterpret_cast<void**>(&pinned_), kBytes), "allocating pinned memory");
    if (used_ + bytes > kBytes) wait();
    std::byte* const at = pinned_ + used_;
    used_ += (bytes + kAlign - 1) / kAlign * kAlign;
    return at;
}

void Staging::wait() {
    check(cudaStreamSynchronize(device_.stream), "waiting for the device");
    used_ = 0;
}

}  // namespace slimrt::cuda
