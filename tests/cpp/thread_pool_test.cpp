// Hammers ThreadPool. Run it under -fsanitize=thread too.
#include "core/thread_pool.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/processors.h"

namespace fs = std::filesystem;
using slimrt::ThreadPool;

namespace {

void check(bool ok, const char* what) {
    if (ok) return;
    std::fprintf(stderr, "thread_pool_test: %s\n", what);
    std::exit(1);
}

/// Every item exactly once, in plain memory that the next job reuses: a worker still inside would show.
void check_coverage(ThreadPool& pool, std::vector<int>& counts, int64_t n_items) {
    std::atomic<bool> thread_ok{true};
    pool.run(n_items, [&](int64_t item, int thread) {
        ++counts[static_cast<size_t>(item)];
        if (thread < 0 || thread >= pool.size()) thread_ok = false;
    });
    check(thread_ok, "thread number out of range");
    for (int64_t i = 0; i < n_items; ++i) {
        check(counts[static_cast<size_t>(i)] == 1, "an item was not run exactly once");
        counts[static_cast<size_t>(i)] = 0;
    }
}

void hammer(int n_threads, int n_jobs) {
    ThreadPool pool(n_threads);
    check(pool.size() == n_threads, "wrong size");
    std::vector<int> counts(300);
    for (int job = 0; job < n_jobs; ++job) {
        check_coverage(pool, counts, job * 7 % 300);
        // Now and then wait about as long as workers spin, so that some are just falling asleep.
        if (job % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(job % 120));
    }
}

/// No two items at once may be given the same thread number: kernels index scratch memory by it.
void check_thread_numbers() {
    ThreadPool pool(4);
    std::vector<std::atomic<int>> inside(4);
    std::atomic<bool> ok{true};
    for (int job = 0; job < 200; ++job) {
        pool.run(64, [&](int64_t, int thread) {
            auto& here = inside[static_cast<size_t>(thread)];
            if (here.fetch_add(1) != 0) ok = false;
            here.fetch_sub(1);
        });
    }
    check(ok, "two items ran at once under one thread number");
}

/// Workers take part: two items that wait for each other both finish, from sleep as well.
void check_parallel() {
    ThreadPool pool(2);
    for (int job = 0; job < 100; ++job) {
        if (job % 10 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        std::atomic<int> arrived{0};
        pool.run(2, [&](int64_t, int) {
            arrived.fetch_add(1);
            while (arrived.load() < 2) std::this_thread::yield();
        });
    }
}

void check_refused(int n_threads) {
    try {
        ThreadPool pool(n_threads);
    } catch (const slimrt::Error& error) {
        check(error.code == slimrt::ErrorCode::argument, "wrong error code");
        return;
    }
    check(false, "an absurd number of threads was accepted");
}

void time_jobs(int n_threads, int n_items) {
    ThreadPool pool(n_threads);
    const int n_jobs = 10000;
    std::atomic<int64_t> sum{0};
    const auto start = std::chrono::steady_clock::now();
    for (int job = 0; job < n_jobs; ++job) {
        pool.run(n_items, [&](int64_t item, int) { sum.fetch_add(item, std::memory_order_relaxed); });
    }
    const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - start;
    std::printf("%3d threads, %3d empty items: %.2f us a job\n", n_threads, n_items, time.count() / n_jobs);
}

/// A made-up RK3588: CPUs 0 to 3 are A55, 4 to 7 A76, as sysfs describes them, as many as this machine has.
void check_fast_cores() {
    const auto here = slimrt::processors();
    if (here.size() < 2) return;  // what is not there cannot be told apart
    const fs::path sysfs = fs::temp_directory_path() / ("slimrt-cpus-" + std::to_string(::getpid()));
    for (size_t i = 0; i < here.size(); ++i) {
        const fs::path cpu = sysfs / ("cpu" + std::to_string(here[i].number));
        fs::create_directories(cpu / "topology");
        std::ofstream(cpu / "cpu_capacity") << (i % 2 ? 1024 : 414) << "\n";
        std::ofstream(cpu / "topology/thread_siblings_list") << here[i].number << "\n";
    }
    const auto all = slimrt::processors(sysfs.string()), fast = slimrt::fast_ones(all);
    fs::remove_all(sysfs);
    check(all.size() == here.size() && fast.size() == here.size() / 2, "fast cores are not told apart");
    check(slimrt::count_cores(fast) == int(fast.size()) && fast[0].number == here[1].number, "wrong cores");
    const auto runs_on = [](size_t n) { return slimrt::processors().size() == n; };
    {
        const slimrt::OnFastCores place(1, fast);
        check(runs_on(fast.size()), "the caller does not keep to the fast cores");
        check(slimrt::processors()[0].number == fast[0].number, "it keeps to others");
        std::thread([&] { check(runs_on(fast.size()), "threads that it starts do not"); }).join();
    }
    check(runs_on(here.size()), "CPUs were not given back");
    {
        const slimrt::OnFastCores more(int(fast.size()) + 1, fast), alike(1, here);
        check(runs_on(here.size()), "threads were moved that should not be");
        ::setenv("SLIMRT_FAST_CORES", "0", 1);
        const slimrt::OnFastCores off(1, fast);
        check(runs_on(here.size()), "SLIMRT_FAST_CORES=0 does not turn it off");
        ::unsetenv("SLIMRT_FAST_CORES");
    }
}

}  // namespace

int main() {
    check_fast_cores();
    for (int n_threads : {1, 2, 3, 8}) hammer(n_threads, 3000);
    for (int i = 0; i < 200; ++i) ThreadPool pool(4);  // ends while workers start, spin or sleep
    check_thread_numbers();
    check_parallel();
    for (int n_threads : {0, -1, 1 << 30}) check_refused(n_threads);
    check(slimrt::default_threads() >= 1, "default_threads() is below 1");
    for (int n_threads : {1, 2, 8}) time_jobs(n_threads, 16);
    std::printf("ok, default_threads() = %d\n", slimrt::default_threads());
}
