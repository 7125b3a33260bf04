// A pool of threads that execute numbered work items. The caller is one of the workers.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

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
    /// one caller at a time. In the child of a fork(), which has none of the parent's threads, the first call
    /// starts new ones.
    void run(int64_t n_items, const std::function<void(int64_t item, int thread)>& fn);

  private:
    class Workers;

    int n_threads_;
    unsigned forks_;  // forks_seen() when the workers began
    std::unique_ptr<Workers> workers_;
};

/// How many times this process and its ancestors forked. What was made under another number has no threads in
/// this process, and may have locks that are never released.
unsigned forks_seen();

}  // namespace slimrt
