// Memory and operations on one device. Eager: every call has happened (CPU) or is ordered (CUDA) when it
// returns. All activations are float32 [tokens, width]; weights are any readable type [out, in].
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace slimrt {

enum class NormKind { rms, layer };
/// clamped_swish: x sigmoid(1.702 x) of x up to 7; as a gate, times 1 and what it gates, which is between -7
/// and 7.
enum class Activation { silu, gelu_tanh, gelu_erf, relu, tanh, relu_squared, clamped_swish };
/// By its name above. Throws Error{unsupported}, which lists them; `where` begins the message.
Activation require_activation(const std::string& name, const std::string& where = "");

/// Rotary position embedding as a table: row p holds, for each of n_rot/2 pairs, cos and sin of position p
/// (interleaved: cos0 sin0 cos1 sin1 ...), any attention factor of YaRN or longrope multiplied in.
/// Of every head the first n_rot columns rotate: pairs (2i, 2i+1) when `interleaved` (GGUF "llama"), else
/// (i, i + n_rot/2) (neox). Backend::rope() has them begin at column `first`.
struct Rope {
    Tensor table;  // [n_ctx, n_rot] f32; none: no rotation
    int n_rot = 0;
    bool interleaved = false;
    int first = 0;  // 0 of rows that attention rotates as it reads them
    explicit operator bool() const { return bool(table); }
};

/// Means of the rows of one plane, of a stretch each, which attention sums when it first needs one.
struct StretchMeans {
    float* base = nullptr;     // [mean][stride]; none are kept
    uint8_t* known = nullptr;  // of each whether it was summed
    size_t stride = 0;         // floats

    float* mean(int32_t i) const { return base + i * stride; }
};

/// The stored rows of one plane. Paged: position p lies in block table[p / block_tokens], block b begins at
/// base + b * block_stride, and in a block stands head after head: its elements of all tokens, then its
/// scales (head_bytes()). Dense (block_tokens == 0, no scales): position p is at base + (p - first) *
/// row_bytes, head after head. Scales belong to a row and head (scale_tokens == 0); or to a channel of a head
/// and each `scale_tokens` neighbouring tokens of a block: such a plane is written by recode() alone.
struct Rows {
    const std::byte* base = nullptr;
    DType dtype = DType::F32;
    int width = 0, heads = 1;
    size_t row_bytes = 0, block_stride = 0;
    int block_tokens = 0;
    int64_t first = 0;
    int scale_tokens = 0;
    StretchMeans means;  // of those that AttentionSequence::means names

    int head_dim() const { return width / heads; }
};

/// Rows to be written: slot s (= block * block_tokens + row in block) of a plane of Rows.
struct Slots {
    std::byte* base = nullptr;
    DType dtype = DType::F32;
    int width = 0, heads = 1;
    size_t row_bytes = 0, block_stride = 0;
    int block_tokens = 0;
    Tensor slots;  // [1, n] I32
    int scale_tokens = 0;
};

/// One sequence's share of an attention call: queries [query, query + n_queries) at positions position,
/// position + 1, ...; each sees the stored rows [begin, end) and, when `fresh`, the fresh rows of its own
/// sequence up to itself; both limited to the last `window` positions.
struct AttentionSequence {
    int query = 0, n_queries = 0;
    int64_t position = 0;
    int64_t begin = 0, end = 0;
    bool fresh = true;
    const int32_t* table = nullptr;  // block table (host memory), none for dense rows
    bool causal = true;              // else every query sees all rows [begin, end)
    int uploaded = -1;               // where Backend::upload_sequences() put it, if it did
    std::span<const int32_t> means;  // of each of its first stretches: in Rows::means (host memory); or -1
};

/// scores += scale * q . rotate(row[head] * row_scale * factor + bias), a factor for each row or row head.
/// Row heads are shared by n_heads_q / n_heads queries each; n_heads == 1: the whole row serves every head
/// (absorbed). Rows may be wider than the n_heads * dim columns that are read: the first ones. So may be the
/// heads of q.
struct ScoreTerm {
    Rows stored;
    Tensor fresh;  // [tokens, width of a row] f32, what store() will write
    int n_heads = 0, dim = 0;
    Tensor q;          // [tokens, n_heads_q heads], rotated where rope is set
    Tensor row_scale;  // [1, n_heads * dim] multiplied into a row, or none
    Rows factors;      // with it a number for each row, or each head of it: f32, 1 or n_heads heads; or none
    Tensor fresh_factors;  // [tokens, 1 or n_heads]
    Tensor bias;           // [1, n_heads * dim] then added to a row, or none
    Rope rope;             // rotation on read, or none: the rows are used as they are
};

/// out[head] = sum over rows of softmax weight * row[head]. Heads of out are out.cols / n_heads_q >= dim
/// columns wide; those past dim are left alone, by `merge` too.
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
    /// The last value term corrects what rounding the others' rows did: unless these are of Q8, sums are of
    /// floats, since it does not know of what the sums lose.
    bool corrected = false;
    int n_heads = 0;  // query heads
    float scale = 1;
    /// cap: a score s is cap * tanh(s / cap), before relative_bias is added to it. 0: none.
    float score_cap = 0;
    int64_t window = 0;  // 0: none; else a query at p sees positions > p - window
    /// [n_heads, n] f32, or none: a score of a row `distance` positions after its query is raised by the
    /// column relative_origin + distance, which there must be for every row that a query sees.
    Tensor relative_bias;
    int64_t relative_origin = 0;
    /// [1, n_heads] f32, or none: a score in every query's softmax that has no value. Of calls that merge,
    /// one has them.
    Tensor sinks;
    Tensor lse;  // [tokens, n_heads]: log of the softmax denominator, with the maximum; or none
    /// Stored values may go unread whose softmax weights, of a query in a head, add up to at most this; the
    /// denominator counts them. Few queries (decoding) over planes of their own heads (mode kv), or over rows
    /// that all heads read (absorbed), of which those passed over stand for their mean.
    float sparse_threshold = 0;
    /// The same for absorbed rows, where the squares of the weights passed over add up to at most its square:
    /// what many small weights of independent values leave out grows like their norm, not like their sum. At
    /// most 1 / sparse_delta^2 rows of a stretch are then read for a head, however long the context.
    float sparse_delta = 0;
    /// out and lse already hold earlier rows' result: combine by log-sum-exp. Of calls of unequal dim the
    /// narrow ones come first, over zeros.
    bool merge = false;
};

/// One of several products of the same x, see Backend::linear.
struct Product {
    Tensor weight, bias, out;
};

inline constexpr int kMaxExperts = 1024;

inline constexpr int kMaxExpertGroups = 32;
inline constexpr float kLeastShares = 1e-20f;  // what shares are renormalised by is more

/// What share of the result the experts that a token takes have: the probabilities that their scores become.
struct Router {
    bool sigmoid = false;       // of each score, else a softmax over all
    bool renormalised = false;  // shares add up to 1
    float scale = 1;            // shares are multiplied with it
    /// Experts are taken from so many groups of neighbours, which have the best expert, of sigmoids the best
    /// two together.
    int groups = 1, groups_used = 1;
    /// SparseMixer (Liu et al., 2024, "GRIN"), if not 0: the share of each expert in turn is a softmax over
    /// those that are not taken yet and whose score s is near its own, b: (b - s) / max(|s|, b) <= near.
    float near = 0;
};

/// Feed-forward networks of which a token takes some, stacked: expert e has the rows from e * rows / n on.
struct Experts {
    int n = 0;
    Tensor gate, up;  // [n * inner, width]; where there is no up, gate has of each expert rows of both
    Tensor down;      // [n * width, inner]
    Tensor gate_bias, up_bias, down_bias;  // f32 [n, inner], [n, inner], [n, width], or none
    Tensor scale;                          // of each expert's result, f32 [1, n], or none

    int64_t inner() const { return down.cols; }
    /// Rows of gate and of up from one expert's to the next one's.
    int64_t step() const { return gate.rows / n; }
    /// The first of step() has those of the first expert.
    Tensor ups() const { return up ? up : gate.rows_of(inner(), gate.rows - inner()); }
};

struct MemoryUse {
    uint64_t weights = 0;  // converted or copied for this process
    uint64_t derived = 0;  // made from weights: W_KV, transposes, rope tables
    uint64_t cache = 0;
    uint64_t scratch = 0;
};

/// Rows of values of all heads that attention with a sparse_threshold met, and how many of them it did not
/// read.
struct SparseCounts {
    uint64_t rows = 0, skipped = 0;
};
enum class MemoryKind { weights, derived, cache, scratch };

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
    /// Whether tensors may lie in any host memory: weights are then read where the file is mapped.
    virtual bool on_host() const = 0;
    /// Bytes that are free now; 0: unknown.
    virtual uint64_t available() const = 0;
    virtual MemoryUse memory() const = 0;
    /// Bytes of the backend's own workspace so far (part of scratch), and a way to have it all at once: the
    /// planner measures the first on a dry backend and reserves it on the real one.
    virtual size_t workspace() const = 0;
    virtual void reserve_workspace(size_t bytes) = 0;

    /// Whether linear() multiplies with this type as it is stored; other types are unpacked at load.
    virtual bool native(DType dtype) const = 0;

    /// out[i] = table[ids[i]]; any readable type to f32. ids: [1, n] I32.
    virtual void gather(Tensor table, Tensor ids, Tensor out) = 0;
    /// Row-wise; weight and bias [1, width] f32 or none. out may be x.
    virtual void norm(NormKind kind, Tensor x, Tensor weight, Tensor bias, float eps, Tensor out) = 0;
    /// out [n, 1] = 1 / sqrt(mean x^2 + eps) of each row.
    virtual void inverse_rms(Tensor x, float eps, Tensor out) = 0;
    /// out = x W^T + bias of each product; x [n, in], W [out, in], out [n, out]; bias [1, out] f32 or none.
    /// Several at once share what is done to x, and the threads do not wait between them.
    virtual void linear(Tensor x, std::span<const Product> products) = 0;
    void linear(Tensor x, Tensor weight, Tensor bias, Tensor out) {
        const Product product{weight, bias, out};
        linear(x, {&product, 1});
    }
    /// Per head: out[:, head] = x[:, head] W_head^T, W = n_heads stacked [m, k]; x [n, n_heads * k],
    /// out [n, n_heads * m].
    virtual void linear_per_head(Tensor x, Tensor weight, int n_heads, Tensor out) = 0;
    /// The ids.cols experts of each token with the highest scores, best first, of equal ones the lowest id,
    /// and their shares. Of sigmoids, or where there is a bias [1, experts] f32, those with the highest sum
    /// of probability and bias, which no share depends on. scores [n, experts] f32 (NaN is the lowest), ids
    /// I32 and shares f32 [n, experts taken].
    virtual void route(const Router& router, Tensor scores, Tensor bias, Tensor ids, Tensor shares) = 0;
    /// out[i] = sum over j of shares[i][j] * scale * down(kind(gate x[i]) * up x[i]) of expert ids[i][j],
    /// with its biases; out may be x.
    virtual void experts(Activation kind, const Experts& experts, Tensor x, Tensor ids, Tensor shares,
                         Tensor out) = 0;
    /// x[head] *= sigmoid(by) of by.cols heads; by [n, heads].
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
    /// What is beyond -limit or limit becomes it.
    virtual void clamp(Tensor x, float limit) = 0;
    /// x[head] *= exp(before - after) of lse.cols heads: what attention gave is given its share of a softmax
    /// over more rows, whose `after` is; before and after are AttentionArgs::lse, -inf before is nothing.
    virtual void reweigh(Tensor x, Tensor before, Tensor after) = 0;
    /// Rows of x (f32) as they would be read back from a plane of this type and as many heads; out may be x.
    virtual void quantize_dequantize(Tensor x, DType dtype, int heads, Tensor out) = 0;
    /// Rounds row i of x (f32) into slot i.
    virtual void store(Tensor x, const Slots& slots) = 0;
    /// Rows [begin, end) of a sequence to f32 out [end - begin, width].
    virtual void load(const Rows& rows, const int32_t* table, int64_t begin, int64_t end, Tensor out) = 0;
    /// Rows [begin, end) of a sequence, of each head the first columns that `to` has (zeros beyond those that
    /// there are), become rows of `to`:
    /// row begin + i is read as load() reads it and coded for slot i. Where `to` has scale_tokens, that many
    /// slots after another are neighbours in a block, from a multiple of scale_tokens on, and the last group
    /// is whole.
    virtual void recode(const Rows& from, const int32_t* table, int64_t begin, int64_t end,
                        const Slots& to) = 0;
    /// What a convolution over rows multiplies with: row i of out is rows i * stride - padding ... of x, side
    /// by side, as many as fit its width; zeros beyond x.
    virtual void unfold(Tensor x, int64_t stride, int64_t padding, Tensor out) = 0;
    /// Attention of many sequences over stored and fresh rows.
    virtual void attention(const AttentionArgs& args) = 0;
    virtual SparseCounts sparse_counts() const = 0;

    /// fn(item, thread) for every item, thread < host_threads(): work on the host, on the threads that the
    /// backend has there. fn must not throw, nor use the backend.
    virtual void run_on_host(int64_t n_items, const std::function<void(int64_t item, int thread)>& fn) {
        for (int64_t item = 0; item < n_items; ++item) fn(item, 0);
    }
    virtual int host_threads() const { return 1; }

    /// Brings what a step reads beside weights and rows where calls read it, all at once: its numbers (I32),
    /// which are returned, and the positions, lengths and block tables of its sequences, of whom it sets
    /// `uploaded`. Valid until the next call, while the caller keeps the numbers. The sequences of a later
    /// call follow one another as they do in one of these lists. Calls about other sequences work too, and
    /// upload their own.
    virtual Tensor upload_step(std::span<const int32_t> numbers,
                               std::span<const std::span<AttentionSequence>>) {
        return {const_cast<int32_t*>(numbers.data()), DType::I32, 1, int64_t(numbers.size())};
    }
    /// out [n, 1] I32: the column of the largest number of each row of x, of equal ones the lowest. Or -1,
    /// where the host has to look: at NaN, +infinity, nothing but -infinity; everywhere if it has the row.
    virtual void likeliest(Tensor, Tensor out) {
        for (int64_t i = 0; i < out.rows; ++i) *out.i32(i) = -1;
    }
    /// Calls body(). A device may capture its calls the first time and replay them whenever `shape` is the
    /// same: then they must not differ, but for what memory holds and for the positions and lengths of
    /// uploaded sequences of one query each.
    virtual void capture_and_replay(const std::string&, const std::function<void()>& body) { body(); }
};

struct CpuOptions {
    int n_threads = 0;  // 0: default_threads()
    std::string isa;    // "avx2", "avx512", "portable"; empty: SLIMRT_ISA, else the best this CPU has
    bool dry = false;
};
std::unique_ptr<Backend> open_cpu_backend(const CpuOptions& options);

/// Names of the CUDA devices that can be used; empty without any, and `why_none` says why.
std::vector<std::string> cuda_devices(std::string* why_none = nullptr);
/// Throws Error{unsupported}: there is no such device, and why.
std::unique_ptr<Backend> open_cuda_backend(int device, bool dry = false);

}  // namespace slimrt
