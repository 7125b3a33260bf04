#include "core/thread_pool.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/processors.h"

namespace slimrt {
namespace {

// The fields of state_: how many workers are in the current job, whether it accepts more, whether the pool
// stops, and the number of the job. One word, so that a worker joins exactly the job it saw, or none.
constexpr uint64_t kInside = 0xffff, kOpen = 1 << 16, kStop = 1 << 17, kOneJob = 1 << 18;
constexpr int kMaxThreads = 1024;

// Covers the pause between two operations of a step, but does not keep a busy core for long.
constexpr auto kSpinTime = std::chrono::microseconds(40);
constexpr int kPausesPerYield = 32;

void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");  // as long as x86's pause; yield does nothing on most cores
#endif
}

/// Waits about a microsecond for ready(), then yields: with more threads than free cores the thread waited
/// for may need this core. Returns ready().
template <class Ready>
bool spin(const Ready& ready) {
    for (int i = 0; i < kPausesPerYield; ++i) {
        if (ready()) return true;
        pause();
    }
    std::this_thread::yield();
    return ready();
}

std::atomic<unsigned> forks{0};

}  // namespace

unsigned forks_seen() {
    static const int handler =
        ::pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
    static_cast<void>(handler);
    return forks.load(std::memory_order_relaxed);
}

/// The threads besides the caller, and their current job.
class ThreadPool::Workers {
  public:
    explicit Workers(int n_threads);
    ~Workers() { stop(); }
    void run(int64_t n_items, const std::function<void(int64_t, int)>& fn);

  private:
    void work(int thread);
    void drain(int thread);
    uint64_t await_job_after(uint64_t job);
    void wake();
    void stop();

    std::atomic<uint64_t> state_{0};             // kInside ...
    alignas(128) std::atomic<int64_t> next_{0};  // written by all: on a cache line (Apple: 128) of its own
    alignas(128) int n_threads_;
    int64_t n_items_ = 0;
    const std::function<void(int64_t, int)>* fn_ = nullptr;
    std::atomic<int> n_sleeping_{0};
    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> threads_;  // last: they use the rest
};

ThreadPool::ThreadPool(int n_threads) : n_threads_(n_threads), forks_(forks_seen()) {
    if (n_threads < 1 || n_threads > kMaxThreads)
        fail(ErrorCode::argument, "n_threads is ", n_threads, ", expected 1 to ", kMaxThreads);
    workers_ = std::make_unique<Workers>(n_threads);
}

ThreadPool::~ThreadPool() {
    // The parent's threads do not exist here and cannot be joined: their data is leaked.
    if (forks_ != forks_seen()) static_cast<void>(workers_.release());
}

void ThreadPool::run(int64_t n_items, const std::function<void(int64_t, int)>& fn) {
    if (n_items <= 1 || n_threads_ == 1) {
        for (int64_t item = 0; item < n_items; ++item) fn(item, 0);
        return;
    }
    if (forks_ != forks_seen()) {
        static_cast<void>(workers_.release());
        workers_ = std::make_unique<Workers>(n_threads_);
        forks_ = forks_seen();
    }
    workers_->run(n_items, fn);
}

ThreadPool::Workers::Workers(int n_threads) : n_threads_(n_threads) {
    threads_.reserve(static_cast<size_t>(n_threads));
    try {
        for (int i = 1; i < n_threads; ++i) threads_.emplace_back([this, i] { work(i); });
    } catch (const std::system_error& error) {
        stop();
        fail(ErrorCode::argument, "cannot start ", n_threads, " threads: ", error.what(), ": use fewer");
    }
}

void ThreadPool::Workers::stop() {
    state_.fetch_or(kStop);
    wake();
    for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::Workers::run(int64_t n_items, const std::function<void(int64_t, int)>& fn) {
    fn_ = &fn;  // no worker is in a job: plain writes, published with state_
    n_items_ = n_items;
    next_.store(0, std::memory_order_relaxed);
    const uint64_t job = state_.load(std::memory_order_relaxed) / kOneJob + 1;
    state_.store(job * kOneJob | kOpen);
    if (n_sleeping_.load() > 0) wake();

    drain(0);
    // Workers that have not joined by now are not waited for: a descheduled worker delays nobody.
    state_.fetch_and(~kOpen, std::memory_order_relaxed);
    const auto all_left = [this] { return (state_.load(std::memory_order_acquire) & kInside) == 0; };
    while (!spin(all_left)) {
    }
}

void ThreadPool::Workers::drain(int thread) {
    for (;;) {
        const int64_t item = next_.fetch_add(1, std::memory_order_relaxed);
        if (item >= n_items_) return;
        (*fn_)(item, thread);
    }
}

void ThreadPool::Workers::work(int thread) {
    const OnFastCores place(n_threads_);
    uint64_t job = 0;
    for (;;) {
        uint64_t state = await_job_after(job);
        if (state & kStop) return;
        job = state / kOneJob;
        while ((state & kOpen) && state / kOneJob == job) {
            if (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acquire)) continue;
            drain(thread);
            state_.fetch_sub(1, std::memory_order_release);
            break;
        }
    }
}

uint64_t ThreadPool::Workers::await_job_after(uint64_t job) {
    uint64_t state = 0;
    const auto ready = [&] {
        state = state_.load();
        return state / kOneJob != job || (state & kStop);
    };
    const auto end = std::chrono::steady_clock::now() + kSpinTime;
    do {
        if (spin(ready)) return state;
    } while (std::chrono::steady_clock::now() < end);
    // Announce the sleep, then look again: run() publishes, then looks for sleepers. One sees the other.
    std::unique_lock lock(mutex_);
    n_sleeping_.fetch_add(1);
    wake_.wait(lock, ready);
    n_sleeping_.fetch_sub(1);
    return state;
}

void ThreadPool::Workers::wake() {
    mutex_.lock();  // a worker that tested before state_ changed is in wait() once this returns
    mutex_.unlock();
    wake_.notify_all();
}

}  // namespace slimrt
