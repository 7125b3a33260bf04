#include "core/thread_pool.h"

#include <chrono>
#include <system_error>

#include "core/error.h"

namespace slimrt {
namespace {

// state_: how many workers are in the current job, whether it takes more, whether the pool ends, and the
// job's number. One word, so that a worker joins the very job it saw or none.
constexpr uint64_t kInside = 0xffff, kOpen = 1 << 16, kStop = 1 << 17, kOneJob = 1 << 18;
constexpr int kMaxThreads = 1024;

// Long enough for the pause between two operations of a step, short enough not to hold a busy core.
constexpr auto kSpinTime = std::chrono::microseconds(40);
constexpr int kPausesPerYield = 32;

void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");  // as long as x86's pause; yield does nothing on most cores
#endif
}

/// Waits for `ready()` about a microsecond, then lets another thread have this core if one wants it: with
/// more threads than free cores that is the thread waited for. Returns ready().
template <class Ready>
bool spin(const Ready& ready) {
    for (int i = 0; i < kPausesPerYield; ++i) {
        if (ready()) return true;
        pause();
    }
    std::this_thread::yield();
    return ready();
}

}  // namespace

ThreadPool::ThreadPool(int n_threads) : n_threads_(n_threads) {
    if (n_threads < 1 || n_threads > kMaxThreads) {
        fail(ErrorCode::argument, "n_threads is ", n_threads, ", expected 1 to ", kMaxThreads);
    }
    threads_.reserve(static_cast<size_t>(n_threads));
    try {
        for (int i = 1; i < n_threads; ++i) threads_.emplace_back([this, i] { work(i); });
    } catch (const std::system_error& error) {
        stop();
        fail(ErrorCode::argument, "cannot start ", n_threads, " threads: ", error.what(), ": use fewer");
    }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
    state_.fetch_or(kStop);
    wake();
    for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::run(int64_t n_items, const std::function<void(int64_t, int)>& fn) {
    if (n_items <= 1 || n_threads_ == 1) {
        for (int64_t item = 0; item < n_items; ++item) fn(item, 0);
        return;
    }
    fn_ = &fn;  // nobody is inside: plain writes, published with the state
    n_items_ = n_items;
    next_.store(0, std::memory_order_relaxed);
    const uint64_t job = state_.load(std::memory_order_relaxed) / kOneJob + 1;
    state_.store(job * kOneJob | kOpen);
    if (n_sleeping_.load() > 0) wake();

    drain(0);
    // Who has not joined by now need not: a worker that the system keeps waiting holds up nobody.
    state_.fetch_and(~kOpen, std::memory_order_relaxed);
    const auto all_left = [this] { return (state_.load(std::memory_order_acquire) & kInside) == 0; };
    while (!spin(all_left)) {
    }
}

void ThreadPool::drain(int thread) {
    for (;;) {
        const int64_t item = next_.fetch_add(1, std::memory_order_relaxed);
        if (item >= n_items_) return;
        (*fn_)(item, thread);
    }
}

void ThreadPool::work(int thread) {
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

uint64_t ThreadPool::await_job_after(uint64_t job) {
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

void ThreadPool::wake() {
    mutex_.lock();  // whoever looked before the news is in wait() once this returns
    mutex_.unlock();
    wake_.notify_all();
}

}  // namespace slimrt
