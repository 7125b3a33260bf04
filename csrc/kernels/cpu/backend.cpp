#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/error.h"
#include "core/processors.h"
#include "kernels/cpu/attention_run.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/interleave.h"
#include "kernels/cpu/row_address.h"

namespace slimrt::cpu {
namespace {

constexpr int64_t kPaddedRows = 16;  // from this many tokens on f32 activations are copied to padded rows
constexpr int64_t kPanelTokens = 2;  // from this many tokens on products take rows side by side
constexpr size_t kCacheLine = 64;

/// A unit of work: rows of one product's weight for `group` heads, which are side by side.
struct LinearItem {
    int product, head, group;
    int64_t first, rows;  // rows of the whole weight
    int64_t column;       // of the first head's output
};

/// Divides all rows into items that become smaller: long streams at first, short waits at the end. Panels
/// (several tokens) start slowly, since their first rows are not prefetched: their items are larger. Sizes
/// are multiples of 16, or of the rows of panels, so that no sum depends on the number of threads.
std::vector<LinearItem> linear_items(std::span<const Product> products, int n_heads, int n_threads,
                                     int64_t n_tokens) {
    int64_t left = 0;
    for (const Product& product : products) left += product.weight.rows;
    const bool by_rows = n_tokens < kPanelTokens;
    const int64_t share_of_each = left / (4 * n_threads) / kPanelRows * kPanelRows;
    const int64_t min_rows = by_rows ? 16 : std::clamp<int64_t>(share_of_each, kPanelRows, 128);
    std::vector<LinearItem> items;
    for (int product = 0; product < int(products.size()); ++product) {
        const auto& [weight, bias, out] = products[product];
        const int64_t m = out.cols / n_heads;
        for (int64_t row = 0; row < weight.rows;) {
            const int64_t share = n_threads == 1 ? left : left / ((by_rows ? 2 : 1) * n_threads);
            const int64_t of_head = m - row % m;
            const int64_t rows = std::min(of_head, std::max(min_rows, share / min_rows * min_rows));
            const int group = int(out.cols / weight.rows), head = int(row / m) * group;
            items.push_back({product, head, group, row, rows, head * m + row % m});
            row += rows;
            left -= rows;
        }
    }
    return items;
}

const float* data_or_null(const Tensor& vector) { return vector ? vector.f32() : nullptr; }

}  // namespace

CpuBackend::CpuBackend(const Isa& isa, int n_threads, bool dry)
    : isa_(isa),
      n_threads_(n_threads),
      access_(chosen_access()),
      pool_(dry ? nullptr : std::make_unique<ThreadPool>(n_threads)),
      memory_(pool_.get()) {}

std::string CpuBackend::description() const {
    return concat("cpu ", isa_.name, ", ", n_threads_, n_threads_ == 1 ? " thread" : " threads");
}

Buffer CpuBackend::alloc(MemoryKind kind, size_t bytes, const char* what) {
    return memory_.alloc(kind, bytes, what);
}

void CpuBackend::upload(Tensor to, const void* from, size_t bytes) {
    if (!dry() && bytes > 0) std::memcpy(to.data, from, bytes);
}

void CpuBackend::download(void* to, Tensor from, size_t bytes) {
    if (!dry()) std::memcpy(to, from.data, bytes);
}

void CpuBackend::run_on_host(int64_t n_items, const std::function<void(int64_t item, int thread)>& fn) {
    run(n_items, fn);
}

void CpuBackend::reserve_workspace(size_t bytes) {
    if (bytes <= workspace_.bytes) return;
    workspace_ = {};  // freed first, so that old and new are never allocated together
    workspace_ = alloc(MemoryKind::scratch, bytes, "the kernels' workspace");
}

std::byte* CpuBackend::workspace_of(size_t bytes) {
    reserve_workspace(bytes);
    return workspace_.data.get();
}

void CpuBackend::gather(Tensor table, Tensor ids, Tensor out) {
    each_row(out.rows, out.cols, [&](int64_t i, int) {
        const int32_t id = ids.i32()[i];
        assert(id >= 0 && id < table.rows);
        if (const DType rows = rows_type(table.dtype); rows != table.dtype)
            return gather_interleaved(table, id, rows, out.f32(i));
        isa_.unpack(number(table.dtype), table.row(id), out.cols, out.f32(i));
    });
}

void CpuBackend::gather_interleaved(Tensor table, int64_t row, DType type, float* out) const {
    const int64_t first = row / kInterleavedRows * kInterleavedRows;
    std::vector<std::byte> one(row_bytes(type, table.cols));
    take_row(table.dtype, table.row(first), row - first, table.cols, one.data());
    isa_.unpack(number(type), one.data(), table.cols, out);
}

void CpuBackend::norm(NormKind kind, Tensor x, Tensor weight, Tensor bias, float eps, Tensor out) {
    const float *w = data_or_null(weight), *b = data_or_null(bias);
    each_row(x.rows, x.cols, [&](int64_t i, int) {
        if (kind == NormKind::rms) {
            isa_.rms_norm(x.f32(i), w, eps, x.cols, out.f32(i));
            if (b) isa_.add(out.f32(i), b, x.cols);
        } else {
            isa_.layer_norm(x.f32(i), w, b, eps, x.cols, out.f32(i));
        }
    });
}

void CpuBackend::inverse_rms(Tensor x, float eps, Tensor out) {
    each_row(x.rows, x.cols, [&](int64_t i, int) { *out.f32(i) = isa_.inverse_rms(x.f32(i), eps, x.cols); });
}

const LinearKernel* CpuBackend::find_kernel(DType dtype, int64_t n_tokens) const {
    for (const LinearKernel* kernel = isa_.linear; kernel->product; ++kernel) {
        if (kernel->weight_type == number(dtype) && n_tokens >= kernel->min_tokens) return kernel;
    }
    return nullptr;
}

void CpuBackend::linear(Tensor x, std::span<const Product> products) {
    if (observer_)
        for (const Product& product : products) observer_(product.weight, x);
    multiply(x, 1, products);
}

void CpuBackend::linear_per_head(Tensor x, Tensor weight, int n_heads, Tensor out) {
    const Product product{weight, {}, out};
    multiply(x, n_heads, {&product, 1});
}

size_t CpuBackend::packed_stride(const LinearKernel& kernel, int64_t n_tokens, int64_t k) {
    if (!kernel.pack && n_tokens < kPaddedRows) return 0;  // x is read in place
    // An odd number of cache lines: rows a power of two apart would compete for the same cache sets.
    return (chunks(kernel.pack ? kernel.packed_bytes(k) : k * sizeof(float), kCacheLine) | 1) * kCacheLine;
}

size_t CpuBackend::max_packed(Tensor x, int n_heads, std::span<const Product> products) const {
    size_t bytes = 0;
    for (size_t i = 0; i < products.size(); ++i) {
        const DType dtype = products[i].weight.dtype;
        const auto same = [&](const Product& other) { return other.weight.dtype == dtype; };
        if (std::any_of(products.begin(), products.begin() + i, same)) continue;
        size_t max_bytes = 0;
        int64_t n = x.rows;  // the most tokens that the next kernel of this type is used for
        for (const LinearKernel* kernel = isa_.linear; kernel->product; ++kernel) {
            if (kernel->weight_type != number(dtype) || n < std::max<int64_t>(kernel->min_tokens, 1))
                continue;
            max_bytes =
                std::max<size_t>(max_bytes, n * n_heads * packed_stride(*kernel, n, x.cols / n_heads));
            n = kernel->min_tokens - 1;
        }
        bytes += max_bytes;
    }
    return bytes;
}

std::vector<CpuBackend::Packed> CpuBackend::pack(Tensor x, int n_heads, std::span<const Product> products) {
    const int64_t k = x.cols / n_heads;
    std::vector<Packed> all;
    size_t bytes = 0;
    for (const Product& product : products) {
        const LinearKernel* kernel = find_kernel(product.weight.dtype, x.rows);
        assert(kernel && "load() unpacks types without a kernel");
        assert(product.weight.cols == k && product.out.cols % product.weight.rows == 0);
        const auto same = std::find_if(
            all.begin(), all.end(), [&](const Packed& other) { return other.kernel->pack == kernel->pack; });
        if (same != all.end()) {
            all.push_back({kernel, same->rows, same->head_bytes, same->offset, true});
            continue;
        }
        const size_t stride = packed_stride(*kernel, x.rows, k);
        all.push_back({kernel, x, stride ? stride : k * sizeof(float), bytes, stride == 0});
        if (stride) all.back().rows.stride = n_heads * stride;
        bytes += x.rows * n_heads * stride;
    }
    std::byte* const workspace = bytes > 0 ? workspace_of(bytes) : nullptr;
    for (Packed& packed : all) {
        if (packed_stride(*packed.kernel, x.rows, k)) packed.rows.data = workspace + packed.offset;
        if (!packed.ready) pack_rows(x, n_heads, packed);
    }
    return all;
}

void CpuBackend::pack_rows(Tensor x, int n_heads, const Packed& packed) {
    const int64_t k = x.cols / n_heads;
    each_row(x.rows * n_heads, k, [&](int64_t item, int) {
        const float* const from = x.f32(item / n_heads) + item % n_heads * k;
        std::byte* const to = packed.rows.row(item / n_heads) + item % n_heads * packed.head_bytes;
        if (packed.kernel->pack)
            packed.kernel->pack(from, k, to);
        else
            std::memcpy(to, from, k * sizeof(float));
    });
}

void CpuBackend::multiply(Tensor x, int n_heads, std::span<const Product> products) {
    if (dry()) {  // the planner reserves the most that any call with fewer tokens needs
        if (const size_t bytes = max_packed(x, n_heads, products)) workspace_of(bytes);
        return;
    }
    const int64_t n = x.rows;
    const std::vector<Packed> packed = pack(x, n_heads, products);
    const std::vector<LinearItem> items = linear_items(products, n_heads, n_threads_, n);
    run(int64_t(items.size()), [&](int64_t i, int) {
        const LinearItem& item = items[i];
        const auto& [weight, bias, out] = products[item.product];
        const Packed& from = packed[item.product];
        for (int i = 0; i < item.group; ++i)
            from.kernel->product(weight.row(item.first), weight.stride, item.rows,
                                 from.rows.data + (item.head + i) * from.head_bytes, from.rows.stride, n,
                                 weight.cols, out.f32() + item.column + i * out.cols / n_heads,
                                 out.stride / sizeof(float), access_.weights[number(weight.dtype)]);
        if (!bias) return;
        for (int64_t t = 0; t < n; ++t) isa_.add(out.f32(t) + item.first, bias.f32() + item.first, item.rows);
    });
}

void CpuBackend::rope(Tensor x, int n_heads, const Rope& rope, Tensor positions) {
    const int64_t head_dim = x.cols / n_heads;
    each_row(x.rows, x.cols, [&](int64_t i, int) {
        const float* rotation = rope.table.f32(positions.i32()[i]);
        for (int head = 0; head < n_heads; ++head) {
            isa_.rope(x.f32(i) + head * head_dim + rope.first, rotation, rope.n_rot, rope.interleaved);
        }
    });
}

void CpuBackend::activate(Activation kind, Tensor x) {
    each_row(x.rows, x.cols, [&](int64_t i, int) { isa_.activate(number(kind), x.f32(i), x.cols); });
}

void CpuBackend::gate(Activation kind, Tensor gate, Tensor up) {
    each_row(gate.rows, gate.cols,
             [&](int64_t i, int) { isa_.gate(number(kind), gate.f32(i), up.f32(i), gate.cols); });
}

void CpuBackend::add(Tensor x, Tensor y) {
    each_row(x.rows, x.cols, [&](int64_t i, int) { isa_.add(x.f32(i), y.f32(y.rows == 1 ? 0 : i), x.cols); });
}

void CpuBackend::multiply(Tensor x, Tensor y, Tensor out) {
    each_row(x.rows, x.cols, [&](int64_t i, int) {
        if (out.data != x.data) std::memcpy(out.f32(i), x.f32(i), x.cols * sizeof(float));
        isa_.multiply(out.f32(i), y.f32(), 1, x.cols);
    });
}

void CpuBackend::scale(Tensor x, float factor) {
    each_row(x.rows, x.cols, [&](int64_t i, int) {
        for (int64_t j = 0; j < x.cols; ++j) x.f32(i)[j] *= factor;
    });
}

void CpuBackend::clamp(Tensor x, float limit) {
    each_row(x.rows, x.cols, [&](int64_t i, int) {
        for (int64_t j = 0; j < x.cols; ++j) x.f32(i)[j] = std::clamp(x.f32(i)[j], -limit, limit);
    });
}

void CpuBackend::reweigh(Tensor x, Tensor before, Tensor after) {
    const int64_t dim = x.cols / before.cols;
    each_row(x.rows, x.cols, [&](int64_t i, int) {
        for (int64_t j = 0; j < x.cols; ++j) {
            const float was = before.f32(i)[j / dim];
            x.f32(i)[j] *=
                was == -std::numeric_limits<float>::infinity() ? 0.0f : std::exp(was - after.f32(i)[j / dim]);
        }
    });
}

void CpuBackend::quantize_dequantize(Tensor x, DType dtype, int heads, Tensor out) {
    const int64_t dim = x.cols / heads;
    const HeadBytes bytes = head_bytes(dtype, dim);
    const size_t scales = chunks(bytes.elements, sizeof(float)) * sizeof(float), size = scales + bytes.scales;
    std::byte* const heads_of_threads = workspace_of(n_threads_ * size);
    each_row(x.rows, x.cols, [&](int64_t i, int thread) {
        std::byte* const head = heads_of_threads + thread * size;
        for (int64_t column = 0; column < x.cols; column += dim) {
            isa_.store_head(number(dtype), x.f32(i) + column, dim, head, head + scales);
            isa_.load_head(number(dtype), head, 0, head + scales, 1, dim, 0, dim, out.f32(i) + column, 0);
        }
    });
}

void CpuBackend::store(Tensor x, const Slots& slots) {
    assert(slots.scale_tokens == 0);
    const int dim = slots.width / slots.heads;
    each_row(x.rows, x.cols, [&](int64_t i, int) {
        for (int head = 0; head < slots.heads; ++head) {
            const HeadSlot to = slot_address(slots, slots.slots.i32()[i], head);
            isa_.store_head(number(slots.dtype), x.f32(i) + head * dim, dim, to.data, to.scales);
        }
    });
}

void CpuBackend::load(const Rows& rows, const int32_t* table, int64_t begin, int64_t end, Tensor out) {
    const int dim = rows.head_dim();
    each_row(end - begin, rows.width, [&](int64_t i, int) {
        for (int head = 0; head < rows.heads; ++head)
            load_run(isa_, rows, rows_at(rows, table, begin + i, begin + i + 1, head), 0, dim,
                     out.f32(i) + head * dim, 0);
    });
}

void CpuBackend::recode(const Rows& from, const int32_t* table, int64_t begin, int64_t end, const Slots& to) {
    assert(from.heads == to.heads);
    const int64_t group = std::max(to.scale_tokens, 1), dim = to.width / to.heads;
    const int64_t read = std::min<int64_t>(dim, from.head_dim());
    assert((end - begin) % group == 0);
    const size_t stride = chunks(dim, kCacheLine) * kCacheLine;
    float* const rows_of_threads =
        reinterpret_cast<float*>(workspace_of(n_threads_ * group * stride * sizeof(float)));
    each_row((end - begin) / group * to.heads, group * dim, [&](int64_t item, int thread) {
        const int head = int(item % to.heads);
        const int64_t first = begin + item / to.heads * group, last = first + group;
        float* const rows = rows_of_threads + thread * group * stride;
        for (int64_t position = first, n; position < last; position += n) {
            const HeadRun run = rows_at(from, table, position, last, head);
            float* const some = rows + (position - first) * stride;
            load_run(isa_, from, run, 0, read, some, stride);
            for (int64_t i = 0; i < run.n; ++i) std::fill_n(some + i * stride + read, dim - read, 0.0f);
            n = run.n;
        }
        const int32_t slot = to.slots.i32()[first - begin];
        const HeadSlot at = slot_address(to, slot, head);
        if (to.scale_tokens == 0) return isa_.store_head(number(to.dtype), rows, dim, at.data, at.scales);
        assert(slot % group == 0 && to.slots.i32()[last - 1 - begin] == slot + group - 1);
        isa_.store_channels(number(to.dtype), rows, stride, group, dim, at.data, at.scales);
    });
}

void CpuBackend::unfold(Tensor x, int64_t stride, int64_t padding, Tensor out) {
    each_row(out.rows, out.cols, [&](int64_t i, int) {
        for (int64_t column = 0, row = i * stride - padding; column < out.cols; column += x.cols, ++row) {
            const bool inside = row >= 0 && row < x.rows;
            float* const to = out.f32(i) + column;
            inside ? std::memcpy(to, x.f32(row), x.cols * sizeof(float))
                   : std::memset(to, 0, x.cols * sizeof(float));
        }
    });
}

void CpuBackend::attention(const AttentionArgs& args) {
    if (dry()) {  // the planner reserves the most that any such call needs
        workspace_of(AttentionPlan::max_floats(args, n_threads_) * sizeof(float));
        return;
    }
    const AttentionPlan plan(args, n_threads_);
    float* const floats = reinterpret_cast<float*>(workspace_of(plan.floats * sizeof(float)));
    std::vector<SparseCounts> counts(plan.by_budget || plan.sparse_absorbed ? n_threads_ : 0);
    const Access access = is_float(args.values[0].stored.dtype) ? access_.float_rows : access_.rows;
    const AttentionRun attention(isa_, access, args, plan, floats, counts.data());
    const auto unknown = attention.take_unknown_means();
    run(unknown.size(), [&](int64_t i, int thread) { attention.sum_mean(unknown[i], thread); });
    run(plan.items.size(), [&](int64_t item, int thread) { attention.compute(plan.items[item], thread); });
    for (const AttentionJob& job : plan.jobs) {
        if (job.n_parts == 1) continue;
        run(job.n_groups * plan.heads_per_group,
            [&](int64_t head, int thread) { attention.merge(job, static_cast<int>(head), thread); });
    }
    for (const SparseCounts& of_thread : counts) {
        sparse_counts_.rows += of_thread.rows;
        sparse_counts_.skipped += of_thread.skipped;
    }
}

}  // namespace slimrt::cpu

namespace slimrt {

std::unique_ptr<Backend> open_cpu_backend(const CpuOptions& options) {
    const int n_threads = options.n_threads == 0 ? default_threads() : options.n_threads;
    return std::make_unique<cpu::CpuBackend>(cpu::choose_isa(options.isa), n_threads, options.dry);
}

}  // namespace slimrt
