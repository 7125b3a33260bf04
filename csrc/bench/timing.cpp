#include "bench/timing.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>

#include "core/error.h"
#include "core/processors.h"
#include "core/thread_pool.h"
#include "kernels/cpu/cpu_backend.h"

namespace slimrt::bench {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

/// run(n, fn) calls fn(item, thread) n times, on all threads.
template <class Run>
void read_by(const Run& run, const cpu::Isa& isa, const void* data, int64_t bytes, cpu::Access access) {
    const int64_t n = bytes / int64_t(sizeof(float)), chunk = 1 << 18;
    const auto* const from = static_cast<const float*>(data);
    std::atomic<float> sink{0};
    run((n + chunk - 1) / chunk, [&](int64_t item, int) {
        sink = isa.read(from + item * chunk, std::min(chunk, n - item * chunk), access);
    });
}

/// Seconds of the faster way.
double time_read(ThreadPool& pool, const void* data, int64_t bytes) {
    double best = std::numeric_limits<double>::infinity();
    for (const cpu::Access& access : kReads) {
        const auto start = Clock::now();
        read_by([&](int64_t n, const auto& fn) { pool.run(n, fn); }, cpu::choose_isa(""), data, bytes,
                access);
        best = std::min(best, seconds_since(start));
    }
    return best;
}

}  // namespace

void read_all(Backend& backend, const void* data, size_t bytes, cpu::Access access) {
    read_by([&](int64_t n, const auto& fn) { backend.run_on_host(n, fn); }, cpu::choose_isa(""), data,
            int64_t(bytes), access);
}

double read_bandwidth(int n_threads, int megabytes) {
    if (n_threads < 0 || megabytes < 1) fail(ErrorCode::argument, "n_threads and megabytes must be positive");
    const auto backend = open_cpu_backend({.n_threads = n_threads});
    ThreadPool pool(n_threads ? n_threads : default_threads());
    const int64_t bytes = int64_t(megabytes) << 20;
    const Buffer buffer = backend->alloc(MemoryKind::scratch, size_t(bytes), "the bandwidth test");
    std::fill_n(reinterpret_cast<float*>(buffer.data.get()), bytes / int64_t(sizeof(float)), 1.0f);
    double best = 0;
    for (int pass = 0; pass < 2; ++pass)
        best = std::max(best, double(bytes) / time_read(pool, buffer.data.get(), bytes) / 1e9);
    return best;
}

std::vector<double> time_linear(Arrays& arrays, const Matrices& weights, int64_t tokens, int n_threads,
                                int passes) {
    if (weights.cols % dtype_info(weights.type).block || weights.rows < 1 || tokens < 0)
        fail(ErrorCode::argument, "there are no such matrices");
    if (!arrays->native(weights.type))
        fail(ErrorCode::argument, "there is no native product for ", dtype_info(weights.type).name);
    const int64_t rows = weights.rows, cols = weights.cols, n = weights.count();
    std::vector<float> values(tokens * cols);
    for (size_t i = 0; i < values.size(); ++i) values[i] = float(i * 2654435761 % 1000) / 500 - 1;
    const Tensor x = arrays.put(values.data(), DType::F32, tokens, cols), out = arrays.zeros(tokens, rows);
    const uint8_t* const bytes = weights.bytes.data();
    const Tensor all = arrays->on_host() ? Tensor(const_cast<uint8_t*>(bytes), weights.type, n * rows, cols)
                                         : arrays.put(bytes, weights.type, n * rows, cols);
    ThreadPool pool(n_threads);
    float first = 0;
    std::vector<double> seconds;
    for (int pass = 0; pass < passes; ++pass) {
        const auto start = Clock::now();
        for (int64_t i = 0; tokens > 0 && i < n; ++i) arrays->linear(x, all.rows_of(i * rows, rows), {}, out);
        if (tokens > 0) arrays->download(&first, out, sizeof first);  // waits for a device
        seconds.push_back(tokens > 0 ? seconds_since(start)
                                     : time_read(pool, bytes, n * int64_t(weights.of_one())));
    }
    return seconds;
}

std::vector<double> time_copy(Arrays& arrays, size_t bytes, int repetitions, int calls) {
    if (bytes < sizeof(float) || calls < 1) fail(ErrorCode::argument, "nothing to copy");
    const Tensor from = arrays.zeros(1, int64_t(bytes / sizeof(float))), to = arrays.zeros(1, from.cols);
    std::vector<double> seconds;
    float first = 0;
    for (int i = 0; i < repetitions; ++i) {
        const auto start = Clock::now();
        for (int call = 0; call < calls; ++call) arrays->upload(to, from.data, to.bytes());
        arrays->download(&first, to, sizeof first);  // waits for a device
        seconds.push_back(seconds_since(start) / calls);
    }
    return seconds;
}

double dot_peak(DType type, const std::string& isa) {
    const bool half = type == DType::F16 || type == DType::BF16;
    double best = 0;
    for (int pass = 0; pass < 5; ++pass) {
        alignas(64) float out[16];
        const auto start = Clock::now();
        const int64_t macs = cpu::choose_isa(isa).busy(uint32_t(half ? DType::F16 : type), 2000000, out);
        best = std::max(best, double(macs) / seconds_since(start) / 1e9);
    }
    return best;
}

}  // namespace slimrt::bench
