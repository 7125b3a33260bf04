// The operations on one CUDA device, all in the order of one stream.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "kernels/cuda/fusion.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/memory.h"
#include "kernels/cuda/staging.h"

namespace slimrt::cuda {

class CudaBackend final : public Backend {
  public:
    CudaBackend(Device device, bool dry);
    ~CudaBackend() override;
    CudaBackend(const CudaBackend&) = delete;
    CudaBackend& operator=(const CudaBackend&) = delete;

    std::string description() const override;
    Buffer alloc(MemoryKind kind, size_t bytes, const char* what) override;
    void upload(Tensor to, const void* from, size_t bytes) override;
    void download(void* to, Tensor from, size_t bytes) override;
    bool dry() const override { return !device_.stream; }
    bool on_host() const override { return false; }
    uint64_t available() const override;
    MemoryUse memory() const override { return memory_.used(); }
    size_t workspace() const override { return workspace_.bytes; }
    void reserve_workspace(size_t bytes) override;
    bool native(DType dtype) const override { return cuda::native(dtype); }
    bool rounds_rows() const override { return true; }

    void gather(Tensor table, Tensor ids, Tensor out) override;
    void norm(NormKind kind, Tensor x, Tensor weight, Tensor bias, float eps, Tensor out) override;
    void inverse_rms(Tensor x, float eps, Tensor out) override;
    void linear(Tensor x, std::span<const Product> products) override;
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
    void scale(Tensor x, float factor) override;
    void clamp(Tensor x, float limit) override;
    void reweigh(Tensor x, Tensor before, Tensor after) override;
    void quantize_dequantize(Tensor x, DType dtype, int heads, Tensor out) override;
    void store(Tensor x, const Slots& slots) override;
    void load(const Rows& rows, const int32_t* table, int64_t begin, int64_t end, Tensor out) override;
    void recode(const Rows& from, const int32_t* table, int64_t begin, int64_t end, const Slots& to) override;
    void unfold(Tensor x, int64_t stride, int64_t padding, Tensor out) override;
    void attention(const AttentionArgs& args) override;
    SparseCounts sparse_counts() const override;

    Tensor upload_step(std::span<const int32_t> numbers,
                       std::span<const std::span<AttentionSequence>> lists) override;
    void likeliest(Tensor x, Tensor out) override;
    void largest(Tensor x, Tensor out) override;
    void capture_and_replay(const std::string& shape, const std::function<void()>& body) override;

  private:
    /// Integers, sequences and their block tables, one after another in device memory, and the host's copy.
    struct Places {
        Buffer data;
        size_t sequences_at = 0, tables_at = 0;
        std::vector<PlacedSequence> placed;
        std::vector<int32_t> ids;                                 // of all tables
        std::vector<std::pair<const int32_t*, size_t>> table_at;  // of the caller's tables, where in ids
    };
    struct Graph {
        cudaGraphExec_t exec = nullptr;  // null: its calls were made once, directly
        bool direct = false;             // they always are: recording failed
        uint64_t last = 0;               // when it was last launched
    };
    static constexpr size_t kMaxGraphs = 64;  // of some 250 kernels each

    void multiply(Tensor x, int n_heads, std::span<const Product> products);
    /// A caller's block table, for rows up to `end`, in device memory.
    const int32_t* table_of(const Rows& rows, const int32_t* table, int64_t end);
    void put(Places& places, std::span<const int32_t> numbers, std::span<AttentionSequence* const> sequences);
    /// Whether the buffer was replaced.
    bool grow(Buffer& buffer, size_t bytes, const char* what);
    /// Copies to the device.
    void send(void* to, const void* from, size_t bytes);
    /// Throws Error{device} while a step is recorded.
    void require_no_recording(const char* what) const;
    Graph& graph_of(const std::string& shape);
    /// Where that fails the graph is `direct`, which is said once.
    void record(Graph& graph, const std::function<void()>& body);
    cudaError_t try_to_record(Graph& graph, const std::function<void()>& body);
    void forget_graphs();
    /// Makes calls, neighbours of which may be fused to one kernel.
    void run_fused(const std::function<void()>& calls);
    /// Makes the device current; false when planning (dry).
    Current ready() const;
    /// The same, after what fusion has put off is started.
    Current ordered();
    std::byte* workspace_of(size_t bytes);

    struct StreamEnd {
        void operator()(cudaStream_t stream) const { cudaStreamDestroy(stream); }
    };

    Device device_;
    std::unique_ptr<CUstream_st, StreamEnd> stream_;  // device_'s; it ends last, also where opening fails
    Memory memory_;
    Memory small_;  // sequences, tables and counts: some KiB that no plan counts
    Staging staging_;
    Fusion fusion_;
    Buffer workspace_, counts_;
    Places places_, loose_;
    std::map<std::string, Graph> graphs_;
    uint64_t n_played_ = 0;
    bool recording_ = false, unrecorded_ = false;  // the latter: a note said so
};

}  // namespace slimrt::cuda
