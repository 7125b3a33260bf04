#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "kernels/cuda/cuda_backend.h"

namespace slimrt::cuda {
namespace {

// Left free beside 1 % of the memory: for kernels that the driver loads when they first start, cuBLASLt,
// graphs.
constexpr uint64_t kOthersBytes = 300ull << 20;

}  // namespace

CudaBackend::CudaBackend(Device device, bool dry)
    : device_(std::move(device)), memory_(device_), small_(device_), staging_(device_), fusion_(device_) {
    if (dry) return;
    const Current current(device_.id);
    check(cudaStreamCreateWithFlags(&device_.stream, cudaStreamNonBlocking), "making a stream");
    stream_.reset(device_.stream);
    counts_ = small_.alloc(MemoryKind::scratch, sizeof(SparseCounts), "counts");
}

CudaBackend::~CudaBackend() {
    if (dry()) return;
    int before = device_.id;
    cudaGetDevice(&before);
    cudaSetDevice(device_.id);
    forget_graphs();
    cudaStreamSynchronize(device_.stream);
    cudaSetDevice(before);
}

std::string CudaBackend::description() const { return concat("cuda ", device_.id, ", ", device_.name); }

Current CudaBackend::ready() const { return Current(device_.id, !dry()); }

Current CudaBackend::ordered() {
    fusion_.start();
    return ready();
}

Buffer CudaBackend::alloc(MemoryKind kind, size_t bytes, const char* what) {
    require_no_recording("needs more memory");
    const Current current = ready();
    return memory_.alloc(kind, bytes, what);
}

uint64_t CudaBackend::available() const {
    const Current current = ready();
    const auto [available, total] = memory_of(device_);
    const uint64_t others = kOthersBytes + total / 100;
    return available > others ? available - others : 1;
}

void CudaBackend::require_no_recording(const char* what) const {
    if (recording_) fail(ErrorCode::device, "a step that is recorded ", what, ", which it did not at first");
}

void CudaBackend::send(void* to, const void* from, size_t bytes) {
    const Current current = ordered();
    if (bytes == 0 || !current) return;
    require_no_recording("copies from the host");
    staging_.copy(to, from, bytes);
}

void CudaBackend::upload(Tensor to, const void* from, size_t bytes) { send(to.data, from, bytes); }

void CudaBackend::download(void* to, Tensor from, size_t bytes) {
    const Current current = ordered();
    if (!current) return;
    require_no_recording("copies to the host");
    staging_.fetch(to, from.data, bytes);
}

void CudaBackend::reserve_workspace(size_t bytes) {
    if (bytes <= workspace_.bytes) return;
    require_no_recording("needs more workspace");
    const Current current = ready();
    fusion_.start();
    forget_graphs();  // they hold its address
    workspace_ = {};
    workspace_ = alloc(MemoryKind::scratch, bytes, "the kernels' workspace");
}

std::byte* CudaBackend::workspace_of(size_t bytes) {
    reserve_workspace(bytes);
    return workspace_.data.get();
}

void CudaBackend::gather(Tensor table, Tensor ids, Tensor out) {
    if (const Current current = ordered()) cuda::gather(device_, table, ids, out);
}

void CudaBackend::norm(NormKind kind, Tensor x, Tensor weight, Tensor bias, float eps, Tensor out) {
    if (const Current current = ready()) fusion_.norm(x, {kind, weight, bias, eps, out});
}

void CudaBackend::inverse_rms(Tensor x, float eps, Tensor out) {
    if (const Current current = ordered()) cuda::inverse_rms(device_, x, eps, out);
}

void CudaBackend::linear(Tensor x, std::span<const Product> products) { multiply(x, 1, products); }

void CudaBackend::linear_per_head(Tensor x, Tensor weight, int n_heads, Tensor out) {
    const Product product{weight, {}, out};
    multiply(x, n_heads, {&product, 1});
}

void CudaBackend::multiply(Tensor x, int n_heads, std::span<const Product> products) {
    const Current real = ready();  // when planning, too: libraries ask for the device when they are opened
    std::byte* const workspace = workspace_of(linear_workspace(device_, x, n_heads, products));
    if (!real) return;
    if (n_heads == 1) return fusion_.linear(x, products, workspace);
    fusion_.start();
    cuda::linear(device_, x, n_heads, products, workspace);
}

void CudaBackend::rope(Tensor x, int n_heads, const Rope& rope, Tensor positions) {
    if (const Current current = ready()) fusion_.rope(x, n_heads, rope, positions);
}

void CudaBackend::activate(Activation kind, Tensor x) {
    if (const Current current = ordered()) cuda::activate(device_, kind, x);
}

void CudaBackend::gate(Activation kind, Tensor gate, Tensor up) {
    if (const Current current = ready()) fusion_.gate(kind, gate, up);
}

void CudaBackend::add(Tensor x, Tensor y) {
    if (const Current current = ready()) fusion_.add(x, y);
}

void CudaBackend::multiply(Tensor x, Tensor y, Tensor out) {
    if (const Current current = ordered()) cuda::multiply(device_, x, y, out);
}

void CudaBackend::scale(Tensor x, float factor) {
    if (const Current current = ordered()) cuda::scale(device_, x, factor);
}

void CudaBackend::clamp(Tensor x, float limit) {
    if (const Current current = ordered()) cuda::clamp(device_, x, limit);
}

void CudaBackend::gate_heads(Tensor x, Tensor by) {
    if (const Current current = ordered()) cuda::gate_heads(device_, x, by);
}

void CudaBackend::route(const Router& router, Tensor scores, Tensor bias, Tensor ids, Tensor shares) {
    if (const Current current = ordered()) cuda::route(device_, router, scores, bias, ids, shares);
}

void CudaBackend::experts(Activation kind, const Experts& experts, Tensor x, Tensor ids, Tensor shares,
                          Tensor out) {
    std::byte* const workspace = workspace_of(experts_workspace(experts, x, ids));
    if (const Current current = ordered())
        cuda::experts(device_, kind, experts, x, ids, shares, out, workspace);
}

void CudaBackend::reweigh(Tensor x, Tensor before, Tensor after) {
    if (const Current current = ordered()) cuda::reweigh(device_, x, before, after);
}

void CudaBackend::quantize_dequantize(Tensor x, DType dtype, int heads, Tensor out) {
    if (const Current current = ordered()) cuda::round(device_, x, dtype, heads, out);
}

void CudaBackend::store(Tensor x, const Slots& slots) {
    if (const Current current = ready()) fusion_.store(x, slots);
}

void CudaBackend::unfold(Tensor x, int64_t stride, int64_t padding, Tensor out) {
    if (const Current current = ordered()) cuda::unfold(device_, x, stride, padding, out);
}

const int32_t* CudaBackend::table_of(const Rows& rows, const int32_t* table, int64_t end) {
    if (rows.block_tokens == 0 || !table) return table;
    const size_t n = (end + kBlockTokens - 1) / kBlockTokens;
    const std::vector<int32_t>& ids = places_.ids;
    const auto known = [&](const auto& at) {  // a table may have grown since
        return at.first == table && at.second + n <= ids.size() &&
               std::equal(table, table + n, ids.begin() + int64_t(at.second));
    };
    const auto& placed = places_.table_at;
    const auto it = std::find_if(placed.begin(), placed.end(), known);
    if (it == placed.end()) {
        AttentionSequence sequence{.end = end, .table = table};
        AttentionSequence* const one[] = {&sequence};
        put(loose_, {}, one);
    }
    const Places& places = it == placed.end() ? loose_ : places_;
    const size_t at = it == placed.end() ? 0 : it->second;
    return reinterpret_cast<const int32_t*>(places.data.data.get() + places.tables_at) + at;
}

void CudaBackend::load(const Rows& rows, const int32_t* table, int64_t begin, int64_t end, Tensor out) {
    if (const Current current = ordered())
        cuda::load(device_, rows, table_of(rows, table, end), begin, end, out);
}

void CudaBackend::recode(const Rows& from, const int32_t* table, int64_t begin, int64_t end,
                         const Slots& to) {
    if (const Current current = ordered())
        cuda::recode(device_, from, table_of(from, table, end), begin, end, to);
}

void CudaBackend::likeliest(Tensor x, Tensor out) {
    if (const Current current = ordered()) cuda::likeliest(device_, x, out);
}

void CudaBackend::largest(Tensor x, Tensor out) {
    if (const Current current = ordered()) cuda::largest(device_, x, out);
}

void CudaBackend::attention(const AttentionArgs& args) {
    std::byte* const workspace = workspace_of(attention_workspace(device_, args));
    const Current current = ordered();
    if (!current || args.sequences.empty()) return;
    int first = args.sequences[0].uploaded;
    const bool placed = first >= 0;
    if (!placed) {
        std::vector<AttentionSequence> copies(args.sequences.begin(), args.sequences.end());
        std::vector<AttentionSequence*> sequences;
        for (AttentionSequence& s : copies) sequences.push_back(&s);
        put(loose_, {}, sequences);
        first = 0;
    }
    const Places& places = placed ? places_ : loose_;
    const auto* const there =
        reinterpret_cast<const PlacedSequence*>(places.data.data.get() + places.sequences_at) + first;
    const int shift = args.sequences[0].query - places.placed[first].query;
    cuda::attention(device_, args, there, shift, reinterpret_cast<SparseCounts*>(counts_.data.get()),
                    workspace);
}

SparseCounts CudaBackend::sparse_counts() const {
    SparseCounts counts;
    const Current current = ready();
    if (!current) return counts;
    check(cudaMemcpyAsync(&counts, counts_.data.get(), sizeof counts, cudaMemcpyDefault, device_.stream),
          "copying");
    check(cudaStreamSynchronize(device_.stream), "waiting for results");
    return counts;
}

}  // namespace slimrt::cuda
