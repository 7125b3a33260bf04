// What a CUDA backend leaves of its thread: the device that others in it have chosen, PyTorch say, is current
// again after every call. The emulator refuses what is started on a device that is not current. And the
// likeliest token of a row, and the largest numbers of one, beside a search for them.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/memory_info.h"
#include "core/notes.h"
#include "cuda_host_runtime.h"
#include "cuda_runtime.h"
#include "kernels/backend.h"
#include "kernels/cuda/device.h"

using namespace slimrt;

/// Rows of random numbers of few values, so that the largest are often several, and of what has no largest.
int test_likeliest() {
    const std::unique_ptr<Backend> backend = open_cuda_backend(0);
    constexpr int64_t kRows = 12;
    constexpr float kInf = INFINITY;
    int failures = 0;
    for (const int64_t cols : {1, 7, 64, 4096, 5003, 9000}) {
        std::vector<float> rows(size_t(kRows * cols));
        std::vector<int32_t> wanted(kRows), found(kRows);
        for (int64_t i = 0; i < kRows; ++i) {
            float* const row = rows.data() + i * cols;
            for (int64_t j = 0; j < cols; ++j) row[j] = float(std::rand() % 60 - 70);
            const int64_t at = std::rand() % cols;
            if (i == 1) std::fill_n(row, cols, -kInf);
            if (i == 2) std::fill_n(row, cols, -kInf), row[at] = -3e38f;
            if (i == 3) row[at] = kInf;
            if (i == 4) row[at] = NAN;
            if (i == 5) row[at] = -NAN;
            if (i == 6) std::fill_n(row, cols, -0.0f), row[at] = 0;
            if (i == 7) std::fill_n(row, cols, 0.0f), row[0] = -0.0f;
            if (i == 8) row[at] = 1e-45f;
            if (i == 9) row[cols - 1] = 3e38f;
            wanted[size_t(i)] =
                i == 1 || (i > 2 && i < 6) ? -1 : int32_t(std::max_element(row, row + cols) - row);
        }
        const Buffer x = backend->alloc(MemoryKind::scratch, rows.size() * sizeof(float), "rows");
        const Buffer out = backend->alloc(MemoryKind::scratch, kRows * sizeof(int32_t), "tokens");
        const Tensor from(x.data.get(), DType::F32, kRows, cols), to(out.data.get(), DType::I32, kRows, 1);
        backend->upload(from, rows.data(), from.bytes());
        backend->likeliest(from, to);
        backend->download(found.data(), to, to.bytes());
        for (size_t i = 0; i < kRows; ++i)
            if (found[i] != wanted[i])
                std::printf("FAIL: of %d columns in row %zu the likeliest is %d, not %d\n", int(cols), i,
                            wanted[i], found[i]),
                    ++failures;
    }
    return failures;
}

/// The largest numbers of a row and then their columns, as Backend::largest() has them.
std::vector<float> largest_of(const float* row, int64_t cols, size_t count) {
    std::vector<int32_t> order(static_cast<size_t>(cols));
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, [&](int32_t a, int32_t b) {
        return row[a] > row[b] || (std::isnan(row[a]) && !std::isnan(row[b]));
    });
    order.resize(count);
    std::ranges::sort(order);
    std::vector<float> found;
    for (const int32_t column : order) found.push_back(row[column]);
    for (const int32_t column : order) found.push_back(std::bit_cast<float>(column));
    return found;
}

/// Numbers that differ, few values, equal ones in large numbers, zeros of both signs, and what is not finite.
int test_largest() {
    const std::unique_ptr<Backend> backend = open_cuda_backend(0);
    constexpr int64_t kRows = 10;
    int failures = 0;
    for (const int64_t cols : {1, 7, 256, 300, 1023, 4096, 5003, 70000}) {
        std::vector<float> rows(size_t(kRows * cols));
        for (size_t i = 0; i < rows.size(); ++i) {
            const float some = float(std::rand()) / float(RAND_MAX);
            const int64_t row = int64_t(i) / cols, column = int64_t(i) % cols;
            const float kinds[kRows] = {some * 30 - 20,
                                        std::round(some * 60 - 70),
                                        1.5f,
                                        some < 0.5f ? -0.0f : 0.0f,
                                        some < 0.01f ? some : -INFINITY,
                                        -INFINITY,
                                        column % 97 == 50 ? INFINITY : some,
                                        column % 1000 == 6 ? (some < 0.5f ? NAN : -NAN) : some,
                                        float(column),
                                        1 + 1e-6f * std::round(some * 4)};
            rows[i] = kinds[row];
        }
        for (const int64_t count : {1, 2, 104, 256}) {
            if (count > cols) continue;
            const Buffer x = backend->alloc(MemoryKind::scratch, rows.size() * sizeof(float), "rows");
            const Buffer out = backend->alloc(MemoryKind::scratch, kRows * 2 * count * sizeof(float), "some");
            const Tensor from(x.data.get(), DType::F32, kRows, cols);
            const Tensor to(out.data.get(), DType::F32, kRows, 2 * count);
            std::vector<float> found(size_t(kRows * 2 * count));
            backend->upload(from, rows.data(), from.bytes());
            backend->largest(from, to);
            backend->download(found.data(), to, to.bytes());
            for (int64_t i = 0; i < kRows; ++i) {
                const float* const of_row = rows.data() + i * cols;
                if (i == 7 && count < (cols + 993) / 1000) {  // which of more NaN than that is not promised
                    if (!std::isnan(found[size_t(i * 2 * count)]))
                        std::printf("FAIL: the largest of %d columns have no NaN\n", int(cols)), ++failures;
                    continue;
                }
                const std::vector<float> wanted = largest_of(of_row, cols, size_t(count));
                if (std::memcmp(wanted.data(), found.data() + i * 2 * count, wanted.size() * sizeof(float)))
                    std::printf("FAIL: the largest %d of %d columns in row %d\n", int(count), int(cols),
                                int(i)),
                        ++failures;
            }
        }
    }
    return failures;
}

/// Recorded steps: those that were not played for long are forgotten, and one that needs more memory than at
/// first says so and harms nothing.
int test_recorded_steps() {
    int failures = 0;
    const int64_t before = cuda_host::n_graphs;
    {
        const std::unique_ptr<Backend> backend = open_cuda_backend(0);
        const Buffer buffer = backend->alloc(MemoryKind::scratch, 64 * sizeof(float), "numbers");
        const Tensor x(buffer.data.get(), DType::F32, 1, 64);
        float numbers[64] = {1};
        backend->upload(x, numbers, sizeof numbers);
        const auto add = [&] { backend->add(x, x); };
        for (int shape = 0; shape < 100; ++shape)
            for (int i = 0; i < 2; ++i) {
                backend->capture_and_replay(std::to_string(shape), add);
                backend->capture_and_replay("often", [&] { backend->scale(x, 0.5f); });
            }
        if (const int64_t n = cuda_host::n_graphs - before; n < 32 || n > 64)
            std::printf("FAIL: %d recorded steps are kept\n", int(n)), ++failures;
        const uint64_t started = cuda_host::n_started;
        backend->capture_and_replay("often",
                                    [] { std::puts("FAIL: what is often played was forgotten"), exit(1); });
        backend->download(numbers, x, sizeof numbers);
        if (numbers[0] != 0.5f || cuda_host::n_started == started)
            std::printf("FAIL: %g, not 0.5, after 401 recorded steps\n", numbers[0]), ++failures;
        int n = 0;
        const auto grows = [&] { backend->reserve_workspace(size_t(++n) << 20), backend->scale(x, 2); };
        backend->capture_and_replay("grows", grows);
        try {
            backend->capture_and_replay("grows", grows);
            std::puts("FAIL: memory was allocated while a step was recorded"), ++failures;
        } catch (const Error& error) {
            if (error.code != ErrorCode::device || !std::strstr(error.what(), "needs more workspace"))
                std::printf("FAIL: %s\n", error.what()), ++failures;
        }
        backend->scale(x, 2);
        backend->download(numbers, x, sizeof numbers);
        if (numbers[0] != 2)
            std::printf("FAIL: %g, not 2, after a step that failed\n", numbers[0]), ++failures;
    }
    if (cuda_host::n_graphs != before) std::puts("FAIL: recorded steps outlive the backend"), ++failures;
    return failures;
}

/// Where CUDA does not record a step, it is recorded without kernels that begin early, or started directly
/// from then on; either is said once, and no error is left to others.
int test_steps_that_are_not_recorded() {
    int failures = 0;
    const auto require = [&](bool good, const std::string& what) {
        if (!good) std::printf("FAIL: %s\n", what.c_str()), ++failures;
    };
    constexpr struct {
        const char *refused, *driver;
        int of_first, of_second, notes;  // calls of two steps, each of which comes four times
    } kCases[] = {
        {"0", "13000", 2, 2, 0}, {"1", "13000", 3, 2, 1}, {"2", "13000", 6, 6, 1}, {"1", "12020", 2, 2, 0}};
    for (const auto& [refused, driver, of_first, of_second, notes] : kCases) {
        setenv("SLIMRT_EMULATED_NO_GRAPHS", refused, 1);
        setenv("SLIMRT_EMULATED_DRIVER", driver, 1);
        const std::unique_ptr<Backend> backend = open_cuda_backend(0);
        const Buffer buffer = backend->alloc(MemoryKind::scratch, 64 * sizeof(float), "numbers");
        const Tensor x(buffer.data.get(), DType::F32, 1, 64);
        float numbers[64] = {1};
        backend->upload(x, numbers, sizeof numbers);
        take_notes();
        int n = 0;
        const auto step = [&] { ++n, backend->scale(x, 2); };
        const std::string what = concat("refused: ", refused, ", driver ", driver, ": ");
        for (int i = 0; i < 4; ++i) backend->capture_and_replay("first", step);
        require(n == of_first, concat(what, n, " calls of the first step"));
        for (int i = 0; i < 4; ++i) backend->capture_and_replay("second", step);
        require(n == of_first + of_second, concat(what, n, " calls of two steps"));
        require(cudaPeekAtLastError() == cudaSuccess, what + "an error is left");
        const std::vector<std::string> said = take_notes();
        require(int(said.size()) == notes, concat(what, said.size(), " notes"));
        backend->download(numbers, x, sizeof numbers);
        require(numbers[0] == 256, concat(what, numbers[0], ", not 256"));
    }
    unsetenv("SLIMRT_EMULATED_NO_GRAPHS");
    unsetenv("SLIMRT_EMULATED_DRIVER");
    return failures;
}

/// A backend ends its stream, also where there is no memory to open it.
int test_streams_end() {
    const int64_t before = cuda_host::n_streams;
    open_cuda_backend(0);
    setenv("SLIMRT_EMULATED_MEMORY", "1000", 1);
    bool failed = false;
    try {
        open_cuda_backend(0);
    } catch (const Error& error) {
        failed = error.code == ErrorCode::wont_fit;
    }
    unsetenv("SLIMRT_EMULATED_MEMORY");
    if (!failed) return std::puts("FAIL: a backend was opened in 1000 bytes"), 1;
    if (cuda_host::n_streams == before) return 0;
    return std::puts("FAIL: streams outlive backends"), 1;
}

/// An integrated GPU has what the host has available, also where that is full of cached files, and no more
/// than its own memory; a card has what CUDA says.
int test_available() {
    int failures = 0;
    const auto available = [](const char* integrated, const char* total) {
        setenv("SLIMRT_EMULATED_INTEGRATED", integrated, 1);
        setenv("SLIMRT_EMULATED_MEMORY", total, 1);
        return open_cuda_backend(0, true)->available();
    };
    const auto require = [&](bool good, const char* what) {
        if (!good) std::printf("FAIL: %s\n", what), ++failures;
    };
    constexpr const char *kLittle = "400000000", *kMuch = "1000000000000";
    constexpr uint64_t kOfLittle = 400000000 - (300 << 20) - 4000000, kOfMuch = 990000000000 - (300 << 20);
    require(available("0", kLittle) == kOfLittle, "not all of a card's memory is available");
    require(available("0", kMuch) == kOfMuch, "a card's memory is not its own");
    require(available("1", kLittle) == kOfLittle, "cached files are not available to an integrated GPU");
    const uint64_t before = available_memory(), of_gpu = available("1", kMuch);
    require(of_gpu <= std::max(before, available_memory()), "an integrated GPU has more than the host");
    unsetenv("SLIMRT_EMULATED_INTEGRATED");
    unsetenv("SLIMRT_EMULATED_MEMORY");
    return failures;
}

int test_advice_after_a_fork() {
    try {
        cuda::check(cudaErrorInitializationError, "copying");
    } catch (const Error& error) {
        if (std::strstr(error.what(), "after the fork")) return 0;
    }
    return std::puts("FAIL: after a fork nothing is advised"), 1;
}

int main() {
    setenv("SLIMRT_EMULATED_DEVICES", "2", 1);
    int failures = test_likeliest() + test_largest() + test_recorded_steps() +
                   test_steps_that_are_not_recorded() + test_available() + test_streams_end() +
                   test_advice_after_a_fork();
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
        const int64_t freed_elsewhere = cuda_host::n_freed_elsewhere;
        for (const size_t bytes : {1 << 20, 1 << 21}) backend->reserve_workspace(bytes);
        expect_first("a larger workspace");
        if (cuda_host::n_freed_elsewhere != freed_elsewhere)
            std::puts("FAIL: a workspace is freed while another device is current"), ++failures;
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
