// The CPU backend: divides the rows of every operation among threads; the kernels of an Isa compute them.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/memory_info.h"
#include "core/thread_pool.h"
#include "kernels/backend.h"
#include "kernels/cpu/access_policy.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/memory.h"

namespace slimrt::cpu {

/// The names of the instruction sets that this CPU can run, best first.
std::vector<std::string> isa_names();
/// The table of this name; if empty, of SLIMRT_ISA, else the best. Throws Error{argument}, which lists the
/// names.
const Isa& choose_isa(const std::string& asked);

inline uint32_t number(DType dtype) { return static_cast<uint32_t>(dtype); }
inline uint32_t number(Activation kind) { return static_cast<uint32_t>(kind); }
inline int64_t chunks(int64_t n, int64_t chunk) { return (n + chunk - 1) / chunk; }

class CpuBackend final : public Backend {
  public:
    CpuBackend(const Isa& isa, int n_threads, bool dry);

    /// Sets how to prefetch; the default is chosen_access().
    void set_access(const AccessPolicy& policy) { access_ = policy; }

    std::string description() const override;
    Buffer alloc(MemoryKind kind, size_t bytes, const char* what) override;
    void upload(Tensor to, const void* from, size_t bytes) override;
    void download(void* to, Tensor from, size_t bytes) override;
    bool dry() const override { return !pool_; }
    bool on_host() const override { return true; }
    uint64_t available() const override { return available_memory(); }
    MemoryUse memory() const override { return memory_.used(); }
    size_t workspace() const override { return workspace_.bytes; }
    void reserve_workspace(size_t bytes) override;
    bool native(DType dtype) const override { return multiplies(isa_, dtype); }

    void gather(Tensor table, Tensor ids, Tensor out) override;
    void norm(NormKind kind, Tensor x, Tensor weight, Tensor bias, float eps, Tensor out) override;
    void inverse_rms(Tensor x, float eps, Tensor out) override;
    void linear(Tensor x, std::span<const Product> products) override;
    bool observe_products(ProductObserver observer) override {
        observer_ = std::move(observer);
        return true;
    }
    void linear_per_head(Tensor x, Tensor weight, int n_heads, Tensor out) override;
    void route(const Router& router, Tensor scores, Tensor bias, Tensor ids, Tensor shares) override;
    void experts(Activation kind, const Experts& experts, Tensor x, Tensor ids, Tensor shares,
                 Tensor out) override;
    void gate_heads(Tensor x, Tensor by) override;
    void rope(Tensor x, int n_heads, const Rope& rope, Tensor positions) override;
    void activate(Activation kind, Tensor x) override;
    void gate(Activation kind, Tensor gate, Tensor up) override;
    void add(Tensor x, Tensor y) override;
    using Backend::multiply;
    void multiply(Tensor x, Tensor y, Tensor out) override;
    void quantize_dequantize(Tensor x, DType dtype, int heads, Tensor out) override;
    void store(Tensor x, const Slots& slots) override;
    void load(const Rows& rows, const int32_t* table, int64_t begin, int64_t end, Tensor out) override;
    void recode(const Rows& from, const int32_t* table, int64_t begin, int64_t end, const Slots& to) override;
    void scale(Tensor x, float factor) override;
    void clamp(Tensor x, float limit) override;
    void reweigh(Tensor x, Tensor before, Tensor after) override;
    void unfold(Tensor x, int64_t stride, int64_t padding, Tensor out) override;
    void attention(const AttentionArgs& args) override;
    SparseCounts sparse_counts() const override { return sparse_counts_; }
    void run_on_host(int64_t n_items, const std::function<void(int64_t item, int thread)>& fn) override;
    int host_threads() const override { return n_threads_; }

  private:
    /// fn(item, thread) for every item, on all threads; nothing when dry.
    template <class Fn>
    void run(int64_t n_items, const Fn& fn) {
        if (pool_) pool_->run(n_items, std::ref(fn));
    }
    /// fn(row, thread) for every row; on all threads when rows of `cols` elements are worth waking them.
    template <class Fn>
    void each_row(int64_t rows, int64_t cols, const Fn& fn) {
        constexpr int64_t kInline = 1 << 15;  // less work than this is done before another thread wakes up
        constexpr int64_t kChunk = 1 << 13;
        const int64_t chunk = rows * cols < kInline ? rows : std::max<int64_t>(1, kChunk / cols);
        run(rows == 0 ? 0 : chunks(rows, chunk), [&](int64_t item, int thread) {
            const int64_t end = std::min(rows, (item + 1) * chunk);
            for (int64_t row = item * chunk; row < end; ++row) fn(row, thread);
        });
    }
    /// Dequantises row `row` of a table of interleaved rows; type: of single rows.
    void gather_interleaved(Tensor table, int64_t row, DType type, float* out) const;
    /// The scratch memory of all operations, valid until the next call; grows to the most that was asked for.
    std::byte* workspace_of(size_t bytes);

    const LinearKernel* find_kernel(DType dtype, int64_t n_tokens) const;
    /// The activations as the kernel of a product reads them: row i, head h is at rows.row(i) + h *
    /// head_bytes.
    struct Packed {
        const LinearKernel* kernel;
        Tensor rows;
        size_t head_bytes;
        size_t offset;  // in the workspace
        bool ready;     // nothing to pack: x as it is, or packed by another product
    };
    /// Bytes of one packed row of one head; 0: x is not packed for so few tokens.
    static size_t packed_stride(const LinearKernel& kernel, int64_t n_tokens, int64_t k);
    /// The largest packed_stride() for n_tokens or fewer.
    size_t max_packed_stride(DType dtype, int64_t n_tokens, int64_t k) const;
    struct SortedPairs;
    struct SortedProduct;
    /// Products of sorted pairs with weights of the same shape. Products with the same x and packing have the
    /// same `packed`.
    void multiply_sorted(const SortedPairs& pairs, std::span<const SortedProduct> products);
    /// The most bytes that packing x, or fewer rows of it, takes.
    size_t max_packed(Tensor x, int n_heads, std::span<const Product> products) const;
    /// Packs x for each product; products that pack alike share the rows.
    std::vector<Packed> pack(Tensor x, int n_heads, std::span<const Product> products);
    void pack_rows(Tensor x, int n_heads, const Packed& packed);
    /// For each head out = x W^T + bias; linear() has one head.
    void multiply(Tensor x, int n_heads, std::span<const Product> products);

    const Isa& isa_;
    const int n_threads_;
    AccessPolicy access_;
    std::unique_ptr<ThreadPool> pool_;  // none when dry
    Memory memory_;
    Buffer workspace_;
    SparseCounts sparse_counts_;
    ProductObserver observer_;  // or none
};

}  // namespace slimrt::cpu
