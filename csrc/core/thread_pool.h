// A pool of threads that share out numbered work items. The caller is one of the workers.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace slimrt {

class ThreadPool {
  public:
    /// `n_threads` >= 1 counts the caller. Workers spin briefly after a job, then sleep.
    explicit ThreadPool(int n_threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int size() const { return n_threads_; }

    /// Calls fn(item, thread) for every item in [0, n_items), each exactly once, thread in [0, size()), and
    /// returns when all are done. Items are handed out one at a time. fn must not throw. Not reentrant:
    /// one caller at a time.
    void run(int64_t n_items, const std::function<void(int64_t item, int thread)>& fn);

  private:
    void work(int thread);
    void drain(int thread);
    uint64_t await_job_after(uint64_t job);
    void wake();
    void stop();

    int n_threads_;
    std::atomic<uint64_t> state_{0};            // see thread_pool.cpp
    alignas(64) std::atomic<int64_t> next_{0};  // written by all: on a cache line without the state
    int64_t n_items_ = 0;
    const std::function<void(int64_t, int)>* fn_ = nullptr;
    std::atomic<int> n_sleeping_{0};
    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> threads_;  // last: they use the rest
};

/// Threads that compute well side by side on this machine: physical (big) cores this process may run on,
/// within its CPU quota; at least 1.
int default_threads();

}  // namespace slimrt
