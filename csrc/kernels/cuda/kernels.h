// What the CUDA kernels offer the backend, by unit. All tensors are device memory; every call is ordered on
// device.stream and returns at once. What a call launches may depend on its arguments but not on what memory
// holds (positions, slots, block tables, lengths), so that a step can be recorded once and replayed.
#pragma once

#include <optional>
#include <span>

#include "kernels/backend.h"
#include "kernels/cuda/device.h"

namespace slimrt::cuda {

/// The arguments of Backend::norm() beside x.
struct Norm {
    NormKind kind;
    Tensor weight, bias;
    float eps;
    Tensor out;
};

// elementwise.cu: see Backend. norm(): x += more first, if there is more.
void gather(const Device& device, Tensor table, Tensor ids, Tensor out);
void norm(const Device& device, Tensor x, const Norm& norm, Tensor more = {});
void inverse_rms(const Device& device, Tensor x, float eps, Tensor out);
void rope(const Device& device, Tensor x, int n_heads, const Rope& rope, Tensor positions);
void activate(const Device& device, Activation kind, Tensor x);
void gate(const Device& device, Activation kind, Tensor gate, Tensor up);
void add(const Device& device, Tensor x, Tensor y);
void multiply(const Device& device, Tensor x, Tensor y, Tensor out);
void scale(const Device& device, Tensor x, float factor);
void clamp(const Device& device, Tensor x, float limit);
void gate_heads(const Device& device, Tensor x, Tensor by);
void reweigh(const Device& device, Tensor x, Tensor before, Tensor after);
void unfold(const Device& device, Tensor x, int64_t stride, int64_t padding, Tensor out);

// likeliest.cu: see Backend.
void likeliest(const Device& device, Tensor x, Tensor out);
void largest(const Device& device, Tensor x, Tensor out);

// cache_rows.cu: see Backend. recode() and load(): the table is in device memory.
void round(const Device& device, Tensor x, DType dtype, int heads, Tensor out);
void store(const Device& device, Tensor x, const Slots& slots);
void recode(const Device& device, const Rows& from, const int32_t* table, int64_t begin, int64_t end,
            const Slots& to);
void load(const Device& device, const Rows& rows, const int32_t* table, int64_t begin, int64_t end,
          Tensor out);

/// Rows of a step that are rotated, stored, or both.
struct StepRows {
    Tensor x;
    int n_heads = 0;
    Rope rope;         // none: not rotated
    Tensor positions;  // of rows that are rotated
    std::optional<Slots> slots;
};
inline constexpr int kMaxStepRows = 4;
/// step_rows.cu: up to kMaxStepRows that do not overlap, of as many rows each.
void step_rows(const Device& device, std::span<const StepRows> all);

// linear.cu. With n_heads > 1: Backend::linear_per_head, one product, whose weight may have fewer heads.
bool native(DType dtype);
size_t linear_workspace(const Device& device, Tensor x, int n_heads, std::span<const Product> products);
void linear(const Device& device, Tensor x, int n_heads, std::span<const Product> products,
            std::byte* workspace);
/// What products of a few tokens may be fused with; memory then holds what single calls would leave there.
struct Around {
    const Norm* norm = nullptr;  // before: of `normed`; x is its output
    Tensor normed;
    const Activation* gate = nullptr;  // after: the first of two products becomes gate(first) * second
    Tensor sum;                        // after: sum += the only product, if there is a sum
};
/// False: nothing was done.
bool linear_around(const Device& device, Tensor x, std::span<const Product> products, const Around& around);

// experts.cu: see Backend.
void route(const Device& device, const Router& router, Tensor scores, Tensor bias, Tensor ids, Tensor shares);
size_t experts_workspace(const Experts& experts, Tensor x, Tensor ids);
void experts(const Device& device, Activation kind, const Experts& experts, Tensor x, Tensor ids,
             Tensor shares, Tensor out, std::byte* workspace);

/// An AttentionSequence in device memory, with its table there, too.
struct PlacedSequence {
    const int32_t* table;
    int64_t position, begin, end;
    int32_t query, n_queries;
    int32_t fresh, causal;
};

// attention.cu. placed: args.sequences in device memory; their `query` may count from another row, so
// query_shift is added to it. Where every sequence has one query, the launch depends on no position, begin or
// end. counts (device memory) are added to where there is a sparse_threshold.
size_t attention_workspace(const Device& device, const AttentionArgs& args);
void attention(const Device& device, const AttentionArgs& args, const PlacedSequence* placed, int query_shift,
               SparseCounts* counts, std::byte* workspace);

}  // namespace slimrt::cuda
