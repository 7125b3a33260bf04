// Arguments of the attention kernels, and the layout of partial results. Scores and maxima are in units of ln
// 2, since 2^x is one instruction.
#pragma once

#include "kernels/cuda/finish_score.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/rows.cuh"

namespace slimrt::cuda {

constexpr float kLog2E = 1.44269504f, kLn2 = 0.69314718f;
constexpr int kBlockRows = 32;                 // of paged planes
constexpr size_t kMaxPartBytes = 16ull << 20;  // of partial results

/// A tensor of f32; strides in floats.
struct FloatRows {
    float* data = nullptr;
    int64_t stride = 0;

    FloatRows() = default;
    explicit FloatRows(Tensor t) : data(t ? t.f32() : nullptr), stride(int64_t(t.stride / sizeof(float))) {}
    __host__ __device__ float* row(int64_t i) const { return data + i * stride; }
};

struct ScoreView {
    RowsView stored, factors;
    FloatRows fresh, fresh_factors, q, rope_table;  // rope_table: of RoPE on read
    const float *row_scale = nullptr, *bias = nullptr;
    int n_heads = 0, dim = 0;
    int q_columns = 0;  // of a head of q
    int n_rot = 0;
    bool interleaved = false;
    bool head_factors = false;  // a factor for each head of a row, else one for all
};

struct ValueView {
    RowsView stored;
    FloatRows fresh, out;
    int n_heads = 0, dim = 0;
    int out_columns = 0;  // of a head of out

    __device__ float* result(int64_t row, int head) const {
        return out.row(row) + int64_t(head) * out_columns;
    }
};

struct AttentionView {
    ScoreView scores[2];
    ValueView values[kMaxValueTerms];
    ScoreFinish finish;
    FloatRows lse;
    const PlacedSequence* sequences = nullptr;
    SparseCounts* counts = nullptr;
    int64_t window = 0;
    int n_scores = 0, n_values = 0, n_heads = 0;
    int value_columns = 0;  // of all value terms
    int query_shift = 0;
    int most_queries = 0;  // of a sequence
    float scale = 1;       // of scores, to units of ln 2
    float sparse_threshold = 0;
    bool merge = false;

    /// Where a column of all value terms, side by side, goes.
    __device__ float* result(int64_t row, int head, int column) const {
        int t = 0;
        for (; t + 1 < n_values && column >= values[t].dim; ++t) column -= values[t].dim;
        return values[t].result(row, head) + column;
    }
};
AttentionView view_of(const AttentionArgs& args, const PlacedSequence* placed, int query_shift,
                      SparseCounts* counts);

/// Results of `n` parts for each (query, head): query i of sequence s and head h have index (s * most_queries
/// + i) * n_heads + h. Values are sums in units of 2^max.
struct Parts {
    int n = 1;
    float* values = nullptr;   // [pair][part][value_columns]; undefined where the sum is 0
    float2* states = nullptr;  // [pair][part]: maximum and sum
};
/// Bytes of the parts of a call. Throws nothing.
size_t part_bytes(const AttentionArgs& args, int n_parts);
Parts place_parts(const AttentionArgs& args, int n_parts, std::byte* workspace);
/// Merges the parts and, with args.merge, what out and lse hold. In attention_parts.cu.
void merge_parts(const Device& device, const AttentionArgs& args, const AttentionView& view,
                 const Parts& parts);

/// Into how many parts to split the rows, where one part makes `blocks` blocks and `places` blocks run at
/// once: so many that the last wave is nearly full, at most `most`, and no more than kMaxPartBytes hold. 1
/// where there are blocks enough.
int parts_for(const AttentionArgs& args, int64_t blocks, int64_t places, int most);

int most_queries(const AttentionArgs& args);

/// The kernel of sequences that all have one query, or all several: the first that can serve them.
enum class AttentionKernel { absorbed, decode, prefill, general };
AttentionKernel attention_kernel(const Device& device, const AttentionArgs& args);

// The kernels, and whether they can serve a call.
void attention_general(const Device& device, const AttentionArgs& args, const AttentionView& view,
                       std::byte* workspace);
bool decode_can(const Device& device, const AttentionArgs& args);
void attention_decode(const Device& device, const AttentionArgs& args, const AttentionView& view,
                      std::byte* workspace);
bool prefill_can(const Device& device, const AttentionArgs& args);
/// For fresh rows in f16, and for parts.
size_t prefill_workspace(const AttentionArgs& args);
void attention_prefill(const Device& device, const AttentionArgs& args, const AttentionView& view,
                       std::byte* workspace);

}  // namespace slimrt::cuda
