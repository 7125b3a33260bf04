// The one contract that matters: (x, attention weights) -> attention output. A cache mode decides which
// projections happen, what one token leaves behind in one layer, and how attention reads it back. Modes are
// stateless and const; memory belongs to KvCache.
#pragma once

#include <cmath>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cache/scratch.h"
#include "kernels/backend.h"

namespace slimrt {

/// One layer's attention as a mode sees it. Widths: q n_heads * head_dim, k and v n_kv_heads * head_dim.
struct AttnConfig {
    int layer = 0;
    int d_model = 0, n_heads = 0, n_kv_heads = 0, head_dim = 0;
    bool rope = false;
    int n_rot = 0;                     // columns of a head that rotate, from its first on; 0 without RoPE
    std::optional<float> qk_norm_eps;  // RMS norm of the whole q and k rows, before RoPE; or none
    int64_t window = 0;
    DType type_k = DType::F16, type_v = DType::F16;
    int rank = 0;  // width of a residual, modes with one; and its type
    DType type_r = DType::F16;
    float sparse_threshold = 0;  // see AttentionArgs
    float scale = 1;             // of scores

    int q_width() const { return n_heads * head_dim; }
    int kv_width() const { return n_kv_heads * head_dim; }
    bool mha() const { return n_heads == n_kv_heads; }
};

struct AttnWeights {
    Tensor q, k, v, o;                      // [out, in], any native type
    Tensor q_bias, k_bias, v_bias, o_bias;  // f32 or none
    Tensor q_norm, k_norm;                  // f32, with AttnConfig::qk_norm_eps
    Tensor relative_bias;  // f32 [n_heads, n_ctx] or none: the last column is for a query's own token

    // Made by prepare(); f32 unless the file holds them. Of vectors none is ones.
    Tensor w_kv;                // modes k, k+r: [v width, k width], V = linear(k row, .) * v_scale + residual
    Tensor v_scale, out_scale;  // mode k+r: [1, v width]; the same for query heads
    Tensor residual_x, residual_k;  // mode k+r: residual row = linear(x, .) + linear(k row, .)
    Tensor residual_v;              // mode k+r: [v width, rank], residual = linear(residual row, .)
    Tensor w_vk;                    // mode v: [k width, v width], K = linear(V, .)
    Tensor row_in, row_k, row_v;    // mode xr: row = linear(x, .), k and v = linear(row, .)
    Tensor rotated_bias;            // mode xr: of k, the rotated columns
    Tensor absorbed_q;              // modes v, x, xr: per head, q -> query against the whole row
    Tensor row_scale, row_shrink;   // [1, row width]: static scales of channels, and 1 / them
    std::vector<Buffer> owned;
};

/// One stored part of a row: `heads` equal shares, which lie apart in a block and have scales of their own.
struct Plane {
    const char* name;
    int width, heads;
    DType type;
};
using Format = std::vector<Plane>;  // how a block is stored: plane after plane (see Rows)

/// What a step's tokens read and write in the layers of one group (see KvCache): their slots, and their
/// sequences with the group's block tables: sequences[i] owns the rows [query, query + n_queries).
struct GroupBatch {
    Tensor slots;  // [1, n] I32
    std::vector<AttentionSequence> sequences;
};

/// The tokens of one step or of one chunk of it.
struct Batch {
    Tensor tokens, positions;                // [1, n] I32
    std::vector<GroupBatch> groups;          // the same sequences in each
    std::vector<AttentionSequence> sources;  // with an encoder: the rows of its output that each of them sees
    bool chunk = false;  // of a longer append of one sequence, each layer going through all chunks
};

/// What the materialised branch of a mode reads in place of stored rows: made once per layer and append, rows
/// by position.
struct DenseRows {
    std::vector<Tensor> planes;      // [n_ctx, width]
    const int32_t* table = nullptr;  // block table of the sequence whose they are
    int64_t end = 0;                 // positions from here on are not there yet
};

struct AttnInput {
    const AttnConfig& config;
    const AttnWeights& weights;
    const Rope& rope;
    const Batch& batch;
    const GroupBatch& group;        // of the layer
    const std::vector<Rows>& rows;  // what is stored, a view for each plane
    DenseRows& dense;
    Scratch& scratch;
    Tensor x;  // [n, d_model], normed
};

/// What the step's tokens leave behind, one f32 tensor [n, width] for each plane, still in scratch.
using FreshRows = std::vector<Tensor>;

/// Gives prepare() the tensors it needs beyond the model's own.
class DerivedWeights {
  public:
    virtual ~DerivedWeights() = default;
    /// blk.<layer>.<suffix>, [rows, cols], from the file or the caller. Throws Error{cache_unsupported} that
    /// says how to make it when there is none.
    virtual Tensor folded(int layer, const char* suffix, int64_t rows, int64_t cols) = 0;
    /// The same for a tensor that a fold may do without: none when there is none. usual: whether a plan is to
    /// count it while there is no fold yet.
    virtual Tensor folded_if_any(int layer, const char* suffix, int64_t rows, int64_t cols, bool usual) = 0;
    /// About how large each channel of the encoder's output is: of its last norm's weight and bias. On a dry
    /// backend ones.
    virtual std::vector<float> source_sizes() = 0;
};

class CacheMode {
  public:
    virtual ~CacheMode() = default;
    virtual const char* name() const = 0;
    /// Why this mode is not exact for this attention; empty when it is legal.
    virtual std::string refusal(const AttnConfig& config) const = 0;
    virtual Format format(const AttnConfig& config) const = 0;
    /// The planes of AttnInput::dense; none where many queries read stored rows as they are.
    virtual Format materialised(const AttnConfig&) const { return {}; }
    /// Whether rows have a part of AttnConfig::rank columns and a type of its own.
    virtual bool has_residual() const { return false; }
    /// Whether a sparse_threshold has something to spare: values that are not needed for scores too.
    virtual bool has_values_alone() const { return false; }
    /// Derived weights, once at load.
    virtual void prepare(Backend&, const AttnConfig&, DerivedWeights&, AttnWeights&) const {}
    /// out [n, q_width] = attention of the step's tokens over stored and fresh rows, before W_O. Fresh rows
    /// are used in full precision; the caller stores them afterwards.
    virtual FreshRows attend(Backend& backend, const AttnInput& in, Tensor out) const = 0;
};

/// All modes, in the order they are tried and shown. registry.cpp.
const std::vector<const CacheMode*>& cache_modes();
/// Throws Error{unsupported} naming the known modes.
const CacheMode& find_cache_mode(const std::string& name);
/// The same, and legal for this layer: else Error{cache_unsupported} naming the layer, the reason and the
/// modes that would work.
const CacheMode& require_cache_mode(const std::string& name, const AttnConfig& config);

}  // namespace slimrt
