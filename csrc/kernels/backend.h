// Memory and operations on one device. Eager: when a call returns it has happened (CPU) or is in the stream
// (CUDA). Activations are float32 [tokens, width]; weights are any readable type [out, in].
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/tensor.h"

namespace slimrt {

enum class NormKind { rms, layer };
/// clamped_swish (gpt-oss): x sigmoid(1.702 x) of min(x, 7); as a gate, times (up clamped to [-7, 7]) + 1.
enum class Activation { silu, gelu_tanh, gelu_erf, relu, tanh, relu_squared, clamped_swish };
/// The activation of this name. Throws Error{unsupported}, which lists the names; `where` begins the message.
Activation require_activation(const std::string& name, const std::string& where = "");

/// Rotary position embedding as a table: row p holds, for each of n_rot/2 pairs, cos and sin of position p
/// (interleaved: cos0 sin0 cos1 sin1 ...), any attention factor of YaRN or longrope multiplied in.
/// Of every head the first n_rot columns rotate: pairs (2i, 2i+1) when `interleaved` (GGUF "llama"), else
/// (i, i + n_rot/2) (neox). Backend::rope() has them begin at column `first`.
struct Rope {
    Tensor table;  // [n_ctx, n_rot] f32; none: no rotation
    int n_rot = 0;
    bool interleaved = false;
    int first = 0;  // must be 0 where attention rotates rows as it reads them
    explicit operator bool() const { return bool(table); }
};

/// Cached means of stretches of rows of one plane, which attention computes when it first needs them.
struct StretchMeans {
    float* base = nullptr;     // [mean][stride]; nullptr: none are cached
    uint8_t* known = nullptr;  // whether each mean is computed
    size_t stride = 0;         // floats

    float* mean(int32_t i) const { return base + i * stride; }
};

/// The stored rows of one plane. Paged: position p is in block table[p / block_tokens]; block b begins at
/// base + b * block_stride and has head after head: elements of all tokens, then their scales (head_bytes()).
/// Dense (block_tokens == 0, no scales): position p is at base + (p - first) * row_bytes, head after head.
/// Scales belong to a row and head (scale_tokens == 0), or to a channel of a head and `scale_tokens`
/// consecutive tokens of a block: only recode() writes such planes.
struct Rows {
    const std::byte* base = nullptr;
    DType dtype = DType::F32;
    int width = 0, heads = 1;
    size_t row_bytes = 0, block_stride = 0;
    int block_tokens = 0;
    int64_t first = 0;
    int scale_tokens = 0;
    StretchMeans means;  // indexed by AttentionSequence::means

    int head_dim() const { return width / heads; }
};

/// Rows to be written: slot s = block * block_tokens + row in the block, of a plane as in Rows.
struct Slots {
    std::byte* base = nullptr;
    DType dtype = DType::F32;
    int width = 0, heads = 1;
    size_t row_bytes = 0, block_stride = 0;
    int block_tokens = 0;
    Tensor slots;  // [1, n] I32
    int scale_tokens = 0;
};

/// One sequence of an attention call: queries [query, query + n_queries) at consecutive positions from
/// `position` on. Each attends to the stored rows [begin, end) and, if `fresh`, to the fresh rows of its
/// sequence up to itself; both limited to the last `window` positions.
struct AttentionSequence {
    int query = 0, n_queries = 0;
    int64_t position = 0;
    int64_t begin = 0, end = 0;
    bool fresh = true;
    const int32_t* table = nullptr;  // block table (host memory), none for dense rows
    bool causal = true;              // else every query attends to all rows [begin, end)
    int uploaded = -1;               // where Backend::upload_step() put it, if it did
    std::span<const int32_t> means;  // of its first stretches: index into Rows::means, or -1 (host memory)
};

/// scores += scale * q . rope(row[head] * row_scale * factor + bias), with a factor for each row or row head.
/// Each row head serves n_heads_q / n_heads query heads; n_heads == 1: the whole row serves every head
/// (absorbed). Rows may be wider than the n_heads * dim columns that are read, which come first; so may the
/// heads of q.
struct ScoreTerm {
    Rows stored;
    Tensor fresh;  // [tokens, width of a row] f32, what store() will write
    int n_heads = 0, dim = 0;
    Tensor q;          // [tokens, n_heads_q heads], with RoPE where `rope` is set
    Tensor row_scale;  // [1, n_heads * dim] times a row, or none
    Rows factors;  // with row_scale: a factor for each row, or each head of it: f32, 1 or n_heads heads; or
                   // none
    Tensor fresh_factors;  // [tokens, 1 or n_heads]
    Tensor bias;           // [1, n_heads * dim] added after that, or none
    Rope rope;             // RoPE applied to rows as they are read, or none
};

/// out[head] = sum over rows of softmax weight * row[head]. Heads of out are out.cols / n_heads_q >= dim
/// columns wide; columns past dim are not written, nor merged.
struct ValueTerm {
    Rows stored;
    Tensor fresh;
    int n_heads = 0, dim = 0;
    Tensor out;  // [tokens, n_heads_q heads]
};

inline constexpr int kMaxValueTerms = 3;

struct AttentionArgs {
    std::span<const AttentionSequence> sequences;
    std::span<const ScoreTerm> scores;  // one or two
    std::span<const ValueTerm> values;  // one to kMaxValueTerms
    /// The last value term corrects the rounding of the rows of the others (k+r). Unless these are Q8, values
    /// are then summed in floats, since it cannot correct errors of the sums.
    bool corrected = false;
    int n_heads = 0;  // query heads
    float scale = 1;
    /// Soft cap: a score s becomes cap * tanh(s / cap), before relative_bias is added. 0: none.
    float score_cap = 0;
    int64_t window = 0;  // 0: none; else a query at p attends to positions > p - window
    /// [n_heads, n] f32, or none: column relative_origin + distance is added to the score of a row `distance`
    /// positions after its query; it must exist for every row that a query attends to.
    Tensor relative_bias;
    int64_t relative_origin = 0;
    /// [1, n_heads] f32, or none: attention sinks, a score in every query's softmax without a value. Of calls
    /// that merge only one has them.
    Tensor sinks;
    Tensor lse;  // [tokens, n_heads]: log-sum-exp of the scores; or none
    /// Stored values whose softmax weights add up to at most this, for each query and head, need not be read;
    /// the denominator counts them. For few queries (decoding) over planes with heads of their own (mode kv),
    /// or over rows that all heads read (absorbed), where the mean of a stretch stands for skipped rows.
    float sparse_threshold = 0;
    /// The same for absorbed rows with a budget for squares: the squares of the skipped weights add up to at
    /// most its square, since the error of many small weights of independent values grows like their norm,
    /// not like their sum. At most 1 / sparse_delta^2 rows of a stretch are then read for a head, however
    /// long the context is.
    float sparse_delta = 0;
    /// out and lse hold the result of earlier rows: combine by log-sum-exp. Of calls with different dim the
    /// narrow ones come first, over zeros.
    bool merge = false;
};

/// One of several products with the same x, see Backend::linear.
struct Product {
    Tensor weight, bias, out;
};

inline constexpr int kMaxExperts = 1024;

inline constexpr int kMaxExpertGroups = 32;
inline constexpr float kLeastShares = 1e-20f;  // added to the sum that shares are renormalised by

/// How scores of a router become shares of the experts in the result.
struct Router {
    bool sigmoid = false;       // sigmoid of each score, else softmax over all
    bool renormalised = false;  // the shares of the chosen experts add up to 1
    float scale = 1;            // factor of all shares
    /// Experts are taken from the best groups_used of `groups` groups of consecutive experts. A group is as
    /// good as its best expert, or, for sigmoids, as the sum of its best two.
    int groups = 1, groups_used = 1;
    /// If not 0, SparseMixer (Liu et al., 2024, "GRIN"): the share of each expert in turn is a softmax over
    /// the experts not taken yet whose score s is near its own, b: (b - s) / max(|s|, b) <= near.
    float near = 0;
};

/// The stacked feed-forward networks of a mixture of experts: expert e has the rows from e * rows / n on.
struct Experts {
    int n = 0;
    Tensor gate, up;  // [n * inner, width]; without `up`, gate has the rows of both for each expert
    Tensor down;      // [n * width, inner]
    Tensor gate_bias, up_bias, down_bias;  // f32 [n, inner], [n, inner], [n, width], or none
    Tensor scale;                          // factor of each expert's result, f32 [1, n], or none

    int64_t inner() const { return down.cols; }
    /// Rows of gate, and of up, from one expert to the next.
    int64_t step() const { return gate.rows / n; }
    /// up, whose first rows are those of the first expert; step() rows further are those of the next.
    Tensor ups() const { return up ? up : gate.rows_of(inner(), gate.rows - inner()); }
};

struct MemoryUse {
    uint64_t weights = 0;  // copied or converted by this process
    uint64_t derived = 0;  // made from weights: W_KV, transposes, rope tables
    uint64_t cache = 0;
    uint64_t scratch = 0;
};

/// Rows of values that attention with a budget has met, counted for every head, and how many it has not read.
struct SparseCounts {
    uint64_t rows = 0, skipped = 0;
};
enum class MemoryKind { weights, derived, cache, scratch };

/// Called with a weight [rows, k] and the rows x [n, k] that it is about to be multiplied by.
using ProductObserver = std::function<void(Tensor weight, Tensor x)>;

class Backend {
  public:
    virtual ~Backend() = default;
    virtual std::string description() const = 0;  // "cpu avx512, 2 threads"

    // Memory. Allocations are zeroed and resident: what was granted never fails later. Throws
    // Error{wont_fit}. A dry backend (planning) counts and computes nothing.
    virtual Buffer alloc(MemoryKind kind, size_t bytes, const char* what) = 0;
    virtual void upload(Tensor to, const void* from, size_t bytes) = 0;
    virtual void download(void* to, Tensor from, size_t bytes) = 0;
    virtual bool dry() const = 0;
    /// Whether tensors may be in any host memory: weights are then read in place from the mapped file.
    virtual bool on_host() const = 0;
    /// Bytes that are free now; 0: unknown.
    virtual uint64_t available() const = 0;
    virtual MemoryUse memory() const = 0;
    /// Bytes of the backend's own workspace so far (part of scratch). The planner measures it on a dry
    /// backend; reserve_workspace() allocates it at once on the real one.
    virtual size_t workspace() const = 0;
    virtual void reserve_workspace(size_t bytes) = 0;

    /// Whether linear() has kernels for this type as it is stored; other types are dequantised at load.
    virtual bool native(DType dtype) const = 0;
    /// Whether linear() rounds many rows to 16 bits for weights of 16 bits.
    virtual bool rounds_rows() const { return false; }

    /// out[i] = table[ids[i]]; any readable type to f32. ids: [1, n] I32.
    virtual void gather(Tensor table, Tensor ids, Tensor out) = 0;
    /// Row-wise; weight and bias [1, width] f32 or none. out may be x.
    virtual void norm(NormKind kind, Tensor x, Tensor weight, Tensor bias, float eps, Tensor out) = 0;
    /// out [n, 1] = 1 / sqrt(mean x^2 + eps) of each row.
    virtual void inverse_rms(Tensor x, float eps, Tensor out) = 0;
    /// Products in one call share the packing of x, and threads do not wait between them.
    virtual void linear(Tensor x, std::span<const Product> products) = 0;
    void linear(Tensor x, Tensor weight, Tensor bias, Tensor out) {
        const Product product{weight, bias, out};
        linear(x, {&product, 1});
    }
    /// From now on linear() and experts() (with the weight of each expert) call it before each product, on
    /// the caller's thread; empty: no longer. False: this backend cannot.
    virtual bool observe_products(ProductObserver) { return false; }
    /// Per head: out[:, head] = x[:, head] W_head^T; x [n, n_heads * k], out [n, n_heads * m]. The weight is
    /// stacked [m, k], one of each head or, if it has fewer, of each group of consecutive heads (GQA).
    virtual void linear_per_head(Tensor x, Tensor weight, int n_heads, Tensor out) = 0;
    /// The ids.cols best experts of each token, best first, of equal scores the lowest id, and their shares.
    /// Best by score; for sigmoids, or with a bias [1, experts] f32, by the sum of probability and bias, of
    /// which the shares do not depend on the bias. scores [n, experts] f32 (NaN is the lowest), ids I32 and
    /// shares f32 [n, experts taken].
    virtual void route(const Router& router, Tensor scores, Tensor bias, Tensor ids, Tensor shares) = 0;
    /// out[i] = sum over j of shares[i][j] * scale * down(kind(gate x[i]) * up x[i]) of expert ids[i][j],
    /// with its biases; out may be x.
    virtual void experts(Activation kind, const Experts& experts, Tensor x, Tensor ids, Tensor shares,
                         Tensor out) = 0;
    /// x[head] *= sigmoid(by), for by.cols heads; by [n, heads].
    virtual void gate_heads(Tensor x, Tensor by) = 0;
    /// In place on x [n, n_heads * head_dim]; positions [1, n] I32.
    virtual void rope(Tensor x, int n_heads, const Rope& rope, Tensor positions) = 0;
    virtual void activate(Activation kind, Tensor x) = 0;
    /// gate = activation(gate) * up, but see clamped_swish.
    virtual void gate(Activation kind, Tensor gate, Tensor up) = 0;
    /// x += y; y may have one row, which is then added to every row of x.
    virtual void add(Tensor x, Tensor y) = 0;
    /// out = x * y, y [1, width], in every row; out may be x. x *= factor.
    virtual void multiply(Tensor x, Tensor y, Tensor out) = 0;
    void multiply(Tensor x, Tensor y) { multiply(x, y, x); }
    virtual void scale(Tensor x, float factor) = 0;
    /// Clamps x to [-limit, limit].
    virtual void clamp(Tensor x, float limit) = 0;
    /// x[head] *= exp(before - after), for before.cols heads: rescales an attention output to a softmax over
    /// more rows, whose log-sum-exp is `after`; before and after are AttentionArgs::lse, and before = -inf
    /// gives 0.
    virtual void reweigh(Tensor x, Tensor before, Tensor after) = 0;
    /// Rows of x (f32) quantised to a plane of this type with `heads` heads, and dequantised; out may be x.
    virtual void quantize_dequantize(Tensor x, DType dtype, int heads, Tensor out) = 0;
    /// Quantises row i of x (f32) to slot i.
    virtual void store(Tensor x, const Slots& slots) = 0;
    /// Dequantises rows [begin, end) of a sequence to f32 out [end - begin, width].
    virtual void load(const Rows& rows, const int32_t* table, int64_t begin, int64_t end, Tensor out) = 0;
    /// Converts rows [begin, end) of a sequence to rows of `to`: row begin + i is dequantised, and its heads,
    /// cut to the columns that `to` has or padded with zeros, are quantised to slot i. If `to` has
    /// scale_tokens, so many consecutive slots are neighbours in a block, from a multiple of scale_tokens on,
    /// and the last group is whole.
    virtual void recode(const Rows& from, const int32_t* table, int64_t begin, int64_t end,
                        const Slots& to) = 0;
    /// im2col for a convolution over rows: row i of out is the rows i * stride - padding ... of x side by
    /// side, as many as fit; zeros beyond x.
    virtual void unfold(Tensor x, int64_t stride, int64_t padding, Tensor out) = 0;
    /// Attention of many sequences over stored and fresh rows.
    virtual void attention(const AttentionArgs& args) = 0;
    virtual SparseCounts sparse_counts() const = 0;

    /// fn(item, thread) for every item, thread < host_threads(), on the backend's host threads. fn must not
    /// throw, nor use the backend.
    virtual void run_on_host(int64_t n_items, const std::function<void(int64_t item, int thread)>& fn) {
        for (int64_t item = 0; item < n_items; ++item) fn(item, 0);
    }
    virtual int host_threads() const { return 1; }

    /// Uploads everything that a step reads beside weights and rows at once: its numbers (I32), which are
    /// returned, and the positions, lengths and block tables of its sequences, whose `uploaded` it sets.
    /// Valid until the next call, while the caller keeps the numbers. Sequences of later calls are in the
    /// order of one of these lists; calls with other sequences upload their own.
    virtual Tensor upload_step(std::span<const int32_t> numbers,
                               std::span<const std::span<AttentionSequence>>) {
        return {const_cast<int32_t*>(numbers.data()), DType::I32, 1, int64_t(numbers.size())};
    }
    /// Argmax: out [n, 1] I32, the column of the largest number of each row of x, of equal ones the lowest.
    /// -1 where the host must look: NaN, +infinity, or nothing but -infinity; in all rows if the host has
    /// them.
    virtual void likeliest(Tensor, Tensor out) {
        for (int64_t i = 0; i < out.rows; ++i) *out.i32(i) = -1;
    }
    /// The largest numbers of each row of x, of equal ones those of the lowest columns, NaN before all
    /// others: out [n, 2 count] has them, then their columns (I32), which ascend; count <= kMaxLargest and
    /// x.cols.
    static constexpr int64_t kMaxLargest = 256;
    virtual void largest(Tensor, Tensor) {
        fail(ErrorCode::unsupported, "the host has these rows: it needs no selection of them");
    }
    /// Calls body(). A device may capture its calls once (CUDA graph) and replay them whenever `shape` is the
    /// same: then they must be the same calls, but for the contents of memory and for positions and lengths
    /// of uploaded sequences of one query each.
    virtual void capture_and_replay(const std::string&, const std::function<void()>& body) { body(); }
};

struct CpuOptions {
    int n_threads = 0;  // 0: default_threads()
    std::string isa;    // "avx2", "avx512", "portable"; empty: SLIMRT_ISA, else the best this CPU has
    bool dry = false;
};
std::unique_ptr<Backend> open_cpu_backend(const CpuOptions& options);

/// Names of the usable CUDA devices; if there are none, `why_none` says why.
std::vector<std::string> cuda_devices(std::string* why_none = nullptr);
/// Throws Error{unsupported}: there is no such device, and why.
std::unique_ptr<Backend> open_cuda_backend(int device, bool dry = false);

}  // namespace slimrt
