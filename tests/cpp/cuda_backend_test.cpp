// What a CUDA backend leaves of its thread: the device that others in it have chosen, PyTorch say, is current
// again after every call. The emulator refuses what is started on a device that is not current.
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "cuda_runtime.h"
#include "kernels/backend.h"

using namespace slimrt;

int main() {
    setenv("SLIMRT_EMULATED_DEVICES", "2", 1);
    int failures = 0;
    const auto expect_first = [&](const char* after) {
        int device = -1;
        cudaGetDevice(&device);
        if (device != 0) std::printf("FAIL: device %d is current after %s\n", device, after), ++failures;
    };
    {
        const std::unique_ptr<Backend> backend = open_cuda_backend(1);
        expect_first("opening");
        const Buffer buffer = backend->alloc(MemoryKind::scratch, 64 * sizeof(float), "numbers");
        expect_first("alloc");
        const Tensor x(buffer.data.get(), DType::F32, 1, 64);
        float numbers[64] = {1, 2};
        backend->upload(x, numbers, sizeof numbers);
        backend->scale(x, 3);
        expect_first("a kernel");
        for (int i = 0; i < 3; ++i) backend->capture_and_replay("twice", [&] { backend->scale(x, 2); });
        expect_first("a recorded step");
        backend->download(numbers, x, sizeof numbers);
        expect_first("download");
        if (numbers[0] != 24 || numbers[1] != 48)
            std::printf("FAIL: %g and %g, not 24 and 48\n", numbers[0], numbers[1]), ++failures;
        size_t free = 0, all = 0;
        cudaMemGetInfo(&free, &all);
        if (backend->available() == 0 || backend->available() + (300 << 20) + all / 100 > free)
            std::puts("FAIL: none, or no memory is left for what nobody plans"), ++failures;
        expect_first("available");
        try {
            backend->alloc(MemoryKind::scratch, size_t{1} << 50, "too much");
            std::puts("FAIL: what no device has was granted"), ++failures;
        } catch (const std::exception&) {
            expect_first("a failure");
        }
    }
    expect_first("closing");
    return failures != 0;
}
