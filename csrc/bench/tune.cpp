#include "bench/tune.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <ctime>
#include <memory>
#include <vector>

#include "bench/stored_rows.h"
#include "bench/timing.h"
#include "bench/weights.h"
#include "core/error.h"
#include "core/huge_pages.h"
#include "core/memory_info.h"
#include "core/processors.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/interleave.h"

namespace slimrt::bench {
namespace {

using Clock = std::chrono::steady_clock;
using cpu::Access;
using cpu::Hint;

constexpr double kWorthwhile = 1.05;
constexpr size_t kPage = 4096;
constexpr int64_t kCols = 4096;                             // of a matrix; of others twice as many
constexpr int kHeads = 8, kCodesDim = 128, kFloatDim = 96;  // of cached rows; of floats between usual widths

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Nanoseconds of this thread alone, which has its share of all work: the kernel brings a process's time up
/// to date for the thread that asks, and for others that run at a tick, which is longer than a turn.
int64_t cpu_time() {
    timespec now{};
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return now.tv_sec * int64_t(1'000'000'000) + now.tv_nsec;
}

/// Never 0.
double cpu_time_since(int64_t start) { return double(std::max<int64_t>(cpu_time() - start, 1)); }

/// What this share of them is smaller than.
double quantile(std::vector<double> of, double share) {
    const auto there = of.begin() + std::ptrdiff_t(double(of.size()) * share);
    std::ranges::nth_element(of, there);
    return *there;
}

double median(const std::vector<double>& of) { return quantile(of, 0.5); }

/// Bytes of a turn, and of memory of which each turn takes the next part: twice what the caches hold.
struct Sizes {
    size_t turn, all;

    /// Not `full`: as little as shows that all works.
    Sizes(int n_threads, bool full) : turn((full ? std::max<size_t>(8, size_t(n_threads) * 2) : 1) << 20) {
        const uint64_t available = available_memory();
        all = std::max(full ? std::min<size_t>(2 * cache_bytes(), 1 << 30) : 0, 4 * turn);
        if (available && all > available / 4) fail(ErrorCode::wont_fit, "no memory to measure with");
    }
};

Buffer small_pages(size_t bytes) {
    void* const data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) fail(ErrorCode::wont_fit, "no memory to measure with");
    refuse_huge_pages(data, bytes);
    return {std::shared_ptr<std::byte>(static_cast<std::byte*>(data),
                                       [bytes](std::byte* p) { ::munmap(p, bytes); }),
            bytes};
}

/// One kind's kernel over the next part of memory, in turn. Time is that of the CPU: others may be at work
/// too.
class Trial {
  public:
    explicit Trial(const std::string& kind, const std::string& isa, int n_threads)
        : backend_(cpu::choose_isa(isa), n_threads, false), slot_(policy_.find(kind)) {}
    virtual ~Trial() = default;

    double time(Access access) {
        *slot_ = access;
        backend_.set_access(policy_);
        const int64_t start = cpu_time();
        turn();
        return cpu_time_since(start);
    }
    /// Of merely reading as much; 0: not measured.
    virtual double read_time() { return 0; }
    Access usual() const { return usual_; }

  protected:
    virtual void turn() = 0;

    cpu::CpuBackend backend_;

  private:
    cpu::AccessPolicy policy_ = cpu::usual_access();
    Access* const slot_;
    const Access usual_ = *slot_;
};

/// Products of one token, in pages as small as a file's may be.
class Products final : public Trial {
  public:
    Products(const std::string& kind, const std::string& isa, int n_threads, bool full)
        : Trial(kind, isa, n_threads), type_(find_dtype(kind.c_str())->dtype) {
        const Sizes sizes(n_threads, full);
        const size_t row = row_bytes(type_, kCols);
        rows_ = int64_t(sizes.turn / row) / 64 * 64;
        turns_ = int64_t(sizes.all / (size_t(rows_) * row));
        memory_ = small_pages(size_t(turns_ * rows_) * row);
        const std::vector<uint8_t> some = random_weights(64 * row);
        backend_.run_on_host(turns_ * rows_ / 16, [&](int64_t item, int) {
            std::memcpy(memory_.data.get() + size_t(item) * 16 * row,
                        some.data() + size_t(item % 4) * 16 * row, 16 * row);
        });
        const std::vector<float> x(2 * kCols, 0.5f);
        arrays_ = {backend_.alloc(MemoryKind::scratch, x.size() * sizeof(float), "x"),
                   backend_.alloc(MemoryKind::scratch, size_t(rows_) * sizeof(float), "out")};
        std::memcpy(arrays_[0].data.get(), x.data(), x.size() * sizeof(float));
    }

    double read_time() override {
        double best = 0;
        for (const Access& access : kReads) {
            const Tensor part = next();
            const int64_t start = cpu_time();
            read_all(backend_, part.data, part.bytes(), access);
            const double time = cpu_time_since(start);
            best = best > 0 ? std::min(best, time) : time;
        }
        return best;
    }

  private:
    Tensor next() {
        const Tensor all(memory_.data.get(), type_, turns_ * rows_, kCols);
        at_ = (at_ + 1) % turns_;
        return all.rows_of(at_ * rows_, rows_);
    }
    /// Half of the memory as each of the matrices that a feed-forward network has: the activations of the
    /// longer rows may fill the first-level cache.
    void turn() override {
        const Tensor part = next();
        for (const int64_t half : {0, 1}) {
            const int64_t cols = kCols << half, rows = rows_ / 2 >> half;
            const Tensor weight(part.rows_of(half * rows_ / 2, rows_ / 2).data, type_, rows, cols);
            static_cast<Backend&>(backend_).linear(Tensor(arrays_[0].data.get(), DType::F32, 1, cols), weight,
                                                   {}, Tensor(arrays_[1].data.get(), DType::F32, 1, rows));
        }
    }

    const DType type_;
    int64_t rows_ = 0, turns_ = 0, at_ = 0;
    Buffer memory_;
    std::vector<Buffer> arrays_;
};

/// Attention of one query of each head over cached rows, of q8 or f16.
class CachedRows final : public Trial {
  public:
    CachedRows(const std::string& kind, const std::string& isa, int n_threads, bool full)
        : Trial(kind, isa, n_threads),
          sizes_(n_threads, full),
          type_(kind == "rows" ? DType::Q8 : DType::F16),
          dim_(kind == "rows" ? kCodesDim : kFloatDim),
          n_(int64_t(sizes_.turn / head_bytes(type_, dim_).total()) / (2 * kHeads) / kBlockTokens *
             kBlockTokens),
          turns_(int64_t(sizes_.all / sizes_.turn)),
          k_(backend_, n_ * turns_, kHeads * dim_, kHeads, type_),
          v_(backend_, n_ * turns_, kHeads * dim_, kHeads, type_),
          row_(zeros(kBlockTokens)),
          q_(zeros(1)),
          out_(zeros(1)) {
        for (int64_t i = 0; i < kBlockTokens * kHeads * dim_; ++i)
            tensor(row_, kBlockTokens).f32()[i] = float(i * 2654435761 % 1000) / 500 - 1;
        std::memcpy(q_.data.get(), row_.data.get(), q_.bytes);
        for (StoredRows* plane : {&k_, &v_}) {
            plane->store(backend_, tensor(row_, kBlockTokens), 0);
            const size_t block = plane->rows.block_stride;
            std::byte *const all = plane->pool.data.get(), *const first =
                                                               all + size_t(plane->table[0]) * block;
            backend_.run_on_host(n_ * turns_ / kBlockTokens, [&](int64_t i, int) {
                if (i != plane->table[0]) std::memcpy(all + size_t(i) * block, first, block);
            });
        }
    }

  private:
    Buffer zeros(int64_t rows) {
        return backend_.alloc(MemoryKind::scratch, size_t(rows) * kHeads * dim_ * sizeof(float), "rows");
    }
    Tensor tensor(const Buffer& of, int64_t rows) const {
        return Tensor(of.data.get(), DType::F32, rows, kHeads * dim_);
    }
    void turn() override {
        at_ = (at_ + 1) % turns_;
        const AttentionSequence sequence{.n_queries = 1,
                                         .position = n_,
                                         .end = n_,
                                         .fresh = false,
                                         .table = k_.table.data() + at_ * n_ / kBlockTokens};
        const ScoreTerm score{k_.rows, {}, kHeads, dim_, tensor(q_, 1)};
        const ValueTerm value{v_.rows, {}, kHeads, dim_, tensor(out_, 1)};
        backend_.attention({.sequences = {&sequence, 1},
                            .scores = {&score, 1},
                            .values = {&value, 1},
                            .n_heads = kHeads,
                            .scale = 1 / std::sqrt(float(dim_))});
    }

    const Sizes sizes_;
    const DType type_;
    const int dim_;
    const int64_t n_, turns_;
    int64_t at_ = 0;
    StoredRows k_, v_;
    Buffer row_, q_, out_;
};

bool is_rows(const std::string& kind) { return kind == "rows" || kind == "float_rows"; }

/// Whether rows may be read side by side, as many streams. Where 16 lie so they are one.
bool has_streams(const std::string& kind) {
    if (is_rows(kind)) return false;
    const DType type = find_dtype(kind.c_str())->dtype;
    return cpu::rows_type(type) == type;
}

std::unique_ptr<Trial> trial_of(const std::string& kind, const std::string& isa, int n_threads, bool full) {
    if (is_rows(kind)) return std::make_unique<CachedRows>(kind, isa, n_threads, full);
    return std::make_unique<Products>(kind, isa, n_threads, full);
}

/// The usual one first, and once: against itself it would win by chance. Of rows no distance is a multiple of
/// 4096, since the lines of a head of floats would meet in the same places of a first-level cache (seen on a
/// Xeon with heads of 64 in f16).
std::vector<Access> candidates(Access usual, bool streams, bool rows) {
    std::vector<Access> all;
    for (const bool several : {false, true}) {
        if (several && !streams) break;
        all.push_back({Hint::none, several, 0});
        for (const Hint hint : {Hint::t0, Hint::t1, Hint::nta})
            for (const int32_t kilobytes : {2, rows ? 6 : 4, rows ? 10 : 8, rows ? 18 : 16})
                all.push_back({hint, several, kilobytes << 10});
    }
    std::erase(all, usual);
    all.insert(all.begin(), usual);
    return all;
}

/// How many times as long the first of them takes as each, turn by turn, at least `least` of them.
std::vector<std::vector<double>> gains(Trial& trial, const std::vector<Access>& of, int least,
                                       double seconds) {
    std::vector<std::vector<double>> found(of.size());
    std::vector<double> now(of.size());
    const auto start = Clock::now();
    for (size_t turn = 0; int(turn) < least || seconds_since(start) < seconds; ++turn) {
        for (size_t i = 0; i < of.size(); ++i) {
            const size_t one = (i + turn) % of.size();
            now[one] = trial.time(of[one]);
        }
        for (size_t i = 0; i < of.size(); ++i) found[i].push_back(now[0] / now[i]);
    }
    return found;
}

double read_share(Trial& trial, Access access) {
    std::vector<double> shares;
    for (int turn = 0; turn < 9; ++turn) {
        const double read = trial.read_time();
        shares.push_back(read / trial.time(access));
    }
    return median(shares);
}

}  // namespace

double huge_page_gain(std::span<const std::byte> bytes, int n_threads) {
    const Sizes sizes(n_threads, true);
    const size_t parts = std::min(bytes.size(), sizes.all) / sizes.turn;
    if (parts < 4) return 1;  // all of it stays in the caches
    cpu::CpuBackend backend(cpu::choose_isa(""), n_threads, false);
    // From everywhere: the kernel may hold some parts of a file in larger pages than others.
    const auto from = [&](size_t part) { return bytes.data() + bytes.size() / parts * part / kPage * kPage; };
    const Buffer copy = backend.alloc(MemoryKind::scratch, parts * sizes.turn, "memory to measure with");
    for (size_t part = 0; part < parts; ++part)
        std::memcpy(copy.data.get() + part * sizes.turn, from(part), sizes.turn);
    // Measured with products, since a prefetch is dropped where the page is not in the TLB.
    const auto rows = int64_t(sizes.turn / row_bytes(DType::Q8_0, kCols));
    std::vector<float> x(kCols), out(static_cast<size_t>(rows));
    const auto time = [&](const std::byte* memory) {
        const Tensor weight(const_cast<std::byte*>(memory), DType::Q8_0, rows, kCols);
        const int64_t start = cpu_time();
        static_cast<Backend&>(backend).linear(Tensor(x.data(), DType::F32, 1, kCols), weight, {},
                                              Tensor(out.data(), DType::F32, 1, rows));
        return cpu_time_since(start);
    };
    std::vector<std::vector<double>> there(parts), here(parts);
    for (size_t i = 0; i < 4 * parts; ++i) {
        const size_t part = i % parts;
        const double a = time(from(part)), b = time(copy.data.get() + part * sizes.turn);
        if (i < parts) continue;  // the first time its pages are mapped
        there[part].push_back(a);
        here[part].push_back(b);
    }
    double all_there = 0, all_here = 0;
    for (size_t part = 0; part < parts; ++part) {
        all_there += median(there[part]);
        all_here += median(here[part]);
    }
    return all_there / all_here;
}

Tuned tune(const std::string& kind, const std::string& isa, int n_threads, double seconds) {
    if (n_threads < 1) fail(ErrorCode::argument, "n_threads must be positive");
    const std::vector<std::string> kinds = cpu::access_kinds(isa);
    if (std::ranges::find(kinds, kind) == kinds.end())
        fail(ErrorCode::argument, "there is nothing to measure of '", kind, "'");
    const bool full = seconds > 0;
    const auto trial = trial_of(kind, isa, n_threads, full);
    const Access usual = trial->usual();
    const std::vector<Access> all = candidates(usual, has_streams(kind), is_rows(kind));
    trial->time(usual);  // wakes threads
    const auto first = gains(*trial, all, full ? 3 : 1, seconds / 2);
    const auto best = std::ranges::max_element(first, {}, median);
    Tuned found{kind, all[size_t(best - first.begin())]};
    if (median(*best) > kWorthwhile) {
        const std::vector<double> again = gains(*trial, {usual, found.best}, full ? 9 : 1, seconds / 4)[1];
        if (quantile(again, 0.25) > 1) found.gain = median(again);
    }
    if (found.gain <= kWorthwhile) found = {kind, usual};
    found.read_share = read_share(*trial, found.best);
    return found;
}

}  // namespace slimrt::bench
