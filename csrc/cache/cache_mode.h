// The contract of cache modes: (x, attention weights) -> attention output. A mode decides which projections
// are computed, what a token's row in a layer holds, and how attention reads it. The owner of rows writes
// them; it and the layers that share them read. In cross-attention the encoder is the owner. Modes are
// stateless and const; memory belongs to KvCache.
#pragma once

#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cache/levels.h"
#include "cache/regions.h"
#include "cache/scratch.h"
#include "kernels/backend.h"

namespace slimrt {

/// One layer's attention as a mode sees it. Widths: q n_heads * head_dim, k and v n_kv_heads * head_dim.
/// Latent attention (MLA, DeepSeek-V2): a row is a latent, of which K and V are made, and n_rot rotated
/// columns of K, the same for all heads. They are the last ones of a head's K; V's heads may be narrower than
/// K's.
struct AttnConfig {
    int layer = 0;
    bool cross = false;  // over an encoder's output, of which a query sees all rows
    int d_model = 0, n_heads = 0, n_kv_heads = 0, head_dim = 0;
    bool rope = false;
    int n_rot = 0;                     // columns of a head that rotate, the first ones; 0 without RoPE
    std::optional<float> qk_norm_eps;  // QK-norm before RoPE, of whole rows or each head; or none
    NormKind qk_norm_kind = NormKind::rms;
    bool norms_heads = false;  // QK-norm of each head
    bool norms_v = false;      // an RMS norm of each head of V, without a weight; with norms_heads
    bool v_is_k = false;       // V is K before its norm and RoPE
    int64_t window = 0;
    DType type_k = DType::F16, type_v = DType::F16;
    int rank = 0;  // width and type of the residual, in modes with has_residual()
    DType type_r = DType::F16;
    int v_heads = 0;       // in modes that compute V: the last KV heads, whose V is kept beside K
    Levels levels;         // in modes with has_levels(); empty: one level, of the types above
    int latent_heads = 1;  // KV heads that share a latent of V, see modes/lowrank.cpp
    float sparse_threshold = 0, sparse_delta = 0;  // see AttentionArgs
    float clamp = 0;                               // 0: none, else q, k and v are clamped to it
    float scale = 1;                               // of scores, before the softmax
    float score_cap = 0;                           // 0: none, see AttentionArgs
    bool sinks = false;                            // heads have attention sinks (AttnWeights::sinks)
    int latent = 0;                                // MLA: width of the latent; else 0
    int value_dim = 0;                             // MLA: width of V's heads
    float latent_eps = 0;                          // MLA: epsilon of the latent's norm

    int norm_width() const {
        return norms_heads ? head_dim : kv_width();
    }  // of what QK-norm norms at once in K
    int q_width() const { return n_heads * head_dim; }
    int kv_width() const { return n_kv_heads * head_dim; }
    int computed_width() const {
        return (n_kv_heads - v_heads) * head_dim;
    }  // of V that is computed, not kept
    int value_width() const { return latent ? n_heads * value_dim : q_width(); }  // of attention's output
    int row_width() const { return latent + n_rot; }                              // MLA: of a row
};

/// The model's own tensors of one attention.
struct AttnWeights {
    Tensor q, k, v, o;  // [out, in], any native type; k and v are empty where another layer's rows are
                        // read, and the same tensor with AttnConfig::v_is_k
    Tensor q_bias, k_bias, v_bias, o_bias;  // f32 or none
    Tensor q_norm, k_norm;                  // f32, with AttnConfig::qk_norm_eps
    Tensor relative_bias;                   // f32 [n_heads, n_ctx] or none; last column: a query's own token
    Tensor sinks;                           // f32 [1, n_heads] or none, see AttentionArgs
    // MLA: q = norm(x q_a^T) q^T. k [row_width, d_model] gives the latent, before k_norm, and K's rotated
    // columns. A head's K and V are latent k_b, [n_heads * latent, head_dim - n_rot], and latent v_b^T,
    // [n_heads * value_dim, latent]. Old files have both in kv_b, for each head K's rows, then V's.
    Tensor q_a, q_a_norm, k_b, v_b, kv_b;
};

/// A tensor blk.<layer>.<suffix> [rows, cols] that folding makes for a mode.
struct Fold {
    const char* suffix;
    int64_t rows, cols;
    bool required = true;  // false: a fold may lack it
    bool planned = true;   // whether a plan counts it before the model is folded
    /// Suffix of a scale for each row, with which it is held in f16; none: it is held as it is.
    const char* scale = nullptr;
    DType type = DType::F32;  // with which a plan counts it before the model is folded
    bool exact = false;       // held in f32 where the rows that it multiplies would be rounded otherwise
    bool used = true;         // false: not with these settings, though a file may have it
};

/// A tensor blk.<layer>.<suffix>, the model's own or folded, that decoding a token does not read.
struct Unread {
    const char* suffix;
    bool replaced;  // a tensor of about its size that was made of it is read instead
};

/// What a mode derived from a layer's weights at load.
struct Prepared {
    explicit Prepared(const AttnWeights& weights) : model(weights) {}
    virtual ~Prepared() = default;
    /// Fingerprint of the folded tensors that rows are written with, 0 without any: rows can only be read
    /// with the same tensors.
    virtual uint64_t fingerprint(Backend&) const { return 0; }

    AttnWeights model;
    std::vector<Buffer> owned;
};

struct PrepareInput {
    const AttnConfig& config;
    const AttnWeights& weights;
    /// By suffix, all of CacheMode::folds(); optional ones may be empty.
    const std::map<std::string, Tensor>& folded;
    /// Cross attention: approximate sizes of the encoder output's channels.
    std::span<const float> encoder_channel_sizes;
};

/// One stored part of a row: `heads` equal pieces, which are apart in a block and have scales of their own,
/// one for each row or, with scale_tokens, one for each channel of that many rows (see Rows).
struct Plane {
    const char* name;
    int width, heads;
    DType type;
    int scale_tokens = 0;

    size_t block_bytes() const {
        return head_bytes(type, width / heads, kBlockTokens, scale_tokens).total() * heads;
    }
};
using Format = std::vector<Plane>;  // how a block is stored: plane after plane (see Rows)

/// Stored rows of an older region (see Regions) of the same sequences, at positions counted from `origin`.
/// The step's own tokens are never among them.
struct OlderRows {
    int c = 0;  // class of rows
    int64_t origin = 0;
    std::vector<AttentionSequence> sequences;
};

/// What a step reads and writes in the layers of a group (see KvCache): its tokens' slots, and its sequences
/// with the group's block tables. The step's rows [query, query + n_queries) are of sequences[i].
struct GroupBatch {
    Tensor slots;  // [1, n] I32; none where KvCache::place() stores the rows later
    std::vector<AttentionSequence> sequences;
    std::vector<OlderRows> older;  // oldest first
};

/// The tokens of a step, or of one chunk of it.
struct Batch {
    Tensor tokens, positions;                       // [1, n] I32
    std::vector<GroupBatch> groups;                 // the same sequences in each
    std::vector<AttentionSequence> encoder_states;  // with an encoder: rows of its output that each sees
    int sequence = -1;                              // handle in KvCache of a step with a single one
    bool chunk = false;  // of a longer append of one sequence: a layer takes all chunks before the next layer
};

/// Rows by position that the materialised branch reads instead of stored ones; made once per layer and
/// append.
struct DenseRows {
    std::vector<Tensor> planes;      // [n_ctx, width]
    const int32_t* table = nullptr;  // block table of their sequence
    int64_t end = 0;                 // positions from here on are not filled yet
};

/// Rows [begin, end) of one class that move to another: at block table `table` in `from`, a view for each
/// plane; to the slots of `to`, which are the positions from to_begin on at to_table. They are whole blocks,
/// unless class 0 gets them. from_aged, to_aged: of a class other than 0; dense rows have not aged.
struct Recoding {
    std::span<const Rows> from;
    const int32_t* table;
    int64_t begin, end;
    std::span<const Slots> to;
    const int32_t* to_table = nullptr;
    int64_t to_begin = 0;
    bool from_aged = false, to_aged = true;
};

/// OlderRows as one layer reads them, with a view for each plane of their class.
struct StoredRegion {
    bool aged;  // false: sinks, which are of class 0
    int64_t origin;
    std::span<const AttentionSequence> sequences;
    std::vector<Rows> rows;
};

/// The tokens that an owner writes and its readers read.
struct AttnInput {
    const AttnConfig& config;
    const Prepared& prepared;                      // the owner's
    const Rope& rope;                              // none where keys are not rotated
    Tensor positions;                              // [1, n] I32
    std::span<const AttentionSequence> sequences;  // empty for an encoder's output, which is only written
    bool chunk;                                    // see Batch
    Scratch& scratch;
};

struct WriteInput : AttnInput {
    Tensor x;                       // [n, d_model], normed, or an encoder's output
    std::vector<Tensor> projected;  // x times each of CacheMode::projections()
    bool shared = false;            // other layers read the rows, too, after x is gone; scratch lives as long
};

/// What a step's tokens leave in an owner's layer, in scratch. Empty in cross-attention, whose rows are
/// written before the step.
struct Written {
    std::vector<Tensor> planes;     // [n, width] f32, one for each plane of the format: these are stored
    std::vector<Tensor> read_back;  // the planes as value terms read them, where that differs
    std::vector<Tensor> dense;  // of each plane of CacheMode::dense_format(); empty: made of x when needed
    Tensor x;                   // the owner's input

    Tensor plane(size_t i) const { return i < planes.size() ? planes[i] : Tensor{}; }
    Tensor value(size_t i) const { return i < read_back.size() ? read_back[i] : plane(i); }
    Written rows_of(int64_t first, int64_t n) const;
};

struct ReadInput : AttnInput {
    Tensor relative_bias, sinks;          // the reader's, as in AttnWeights
    const std::vector<Rows>& rows;        // stored rows, a view for each plane
    std::span<const StoredRegion> older;  // those of older regions, oldest first
    DenseRows& dense;
    Tensor q;  // [n, q_width], with bias, norm and RoPE
};

struct Projection {
    Tensor weight, bias;
};

/// A step that the planner runs: n tokens of one sequence after `cached` ones.
struct Extreme {
    int64_t n, cached;
};

class CacheMode {
  public:
    virtual ~CacheMode() = default;
    virtual const char* name() const = 0;
    /// Whether it is a mode of cross-attention, or of self-attention.
    virtual bool serves(bool cross) const { return !cross; }
    /// Why this mode is not exact for this attention, whose q, k and v are not clamped; empty where it is. To
    /// be called by way of refusal_of().
    virtual std::string refusal(const AttnConfig& config) const = 0;
    virtual Format format(const AttnConfig& config) const = 0;
    /// Formats of the older classes of rows, newest first, empty where rows do not age; and how a sequence
    /// divides into classes.
    virtual std::vector<Format> older_formats(const AttnConfig&) const { return {}; }
    virtual Regions regions(const AttnConfig&) const { return {}; }
    /// Moves rows to another class, plane by plane. May use recoding_scratch() bytes.
    virtual void recode(Backend& backend, const AttnInput&, const Recoding& r) const {
        for (size_t plane = 0; plane < r.to.size(); ++plane)
            backend.recode(r.from[plane], r.table, r.begin, r.end, r.to[plane]);
    }
    virtual size_t recoding_scratch(const AttnConfig&) const { return 0; }
    /// The planes of DenseRows; empty where many queries read stored rows, too. Modes whose rows age have
    /// them, one for each plane of a row, so that a prompt is exact however it is stored.
    virtual Format dense_format(const AttnConfig&) const { return {}; }
    /// Whether rows have a residual of AttnConfig::rank columns and a type of its own.
    virtual bool has_residual() const { return false; }
    /// Whether some heads may keep V (AttnConfig::v_heads).
    virtual bool has_v_heads() const { return false; }
    /// Whether AttnConfig::levels say what rows become as they age; and the levels if nothing else is said.
    virtual bool has_levels() const { return false; }
    virtual Levels default_levels() const { return {}; }
    /// Whether a latent of V is stored in place of V, which keys may predict (Levels::predicts).
    virtual bool has_latents() const { return false; }
    /// Which values sparse attention may leave unread: rows that scores do not need,
    virtual bool has_values_alone() const { return false; }
    /// or whole rows that every head sums, at n_heads times the arithmetic.
    virtual bool has_values_of_all() const { return false; }
    /// Whether rows contain V's bias. Else W_O b_V goes to the output's, since softmax weights sum to 1.
    virtual bool keeps_v_bias() const { return false; }
    /// Whether it is a mode for latent attention (MLA), else for all other.
    virtual bool for_latent_attention() const { return false; }
    /// Cross-attention: whether one layer's rows serve all layers.
    virtual bool shared() const { return false; }

    /// The tensors that folding makes for it.
    virtual std::vector<Fold> folds(const AttnConfig&) const { return {}; }
    /// The tensors of a layer that decoding a token does not read.
    virtual std::vector<Unread> unread(const AttnConfig&) const { return {}; }
    /// The weight that folding inverts, "W_K" or "W_V", or "": the inverse amplifies the rounding of rows.
    virtual const char* inverts() const { return ""; }
    /// Derives weights, once at load.
    virtual std::unique_ptr<Prepared> prepare(Backend&, const PrepareInput& in) const {
        return std::make_unique<Prepared>(in.weights);
    }

    /// What write() needs x multiplied with; computed in one product with the layer's own q.
    virtual std::vector<Projection> projections(const Prepared&) const { return {}; }
    /// Owner: what the tokens leave behind, made of x. The caller stores the planes.
    virtual Written write(Backend& backend, const WriteInput& in) const = 0;
    /// Reader: out [n, value_width] = attention of the tokens over stored and written rows, before W_O.
    /// Written rows are used in full precision.
    virtual void read(Backend& backend, const ReadInput& in, const Written& written, Tensor out) const = 0;
    /// Cross-attention: K [n, kv_width] of stored rows [n, width] of the first plane.
    virtual Tensor keys(Backend&, const Prepared&, Scratch&, Tensor rows) const { return rows; }

    /// The steps that need the most scratch, where one sequence has at most `longest` of a step's `tokens`:
    /// many queries over a full context, many over an empty one, few, of any sequences, over a full one.
    virtual std::vector<Extreme> extremes(const AttnConfig& config, int64_t tokens, int64_t longest,
                                          int64_t n_ctx) const;
};

/// CacheMode::refusal(), and what holds for all modes (MLA, clamped or normed K and V, sinks).
std::string refusal_of(const CacheMode& mode, const AttnConfig& config);

/// The modes of self- or cross-attention, in the order in which they are tried and shown. In registry.cpp.
std::vector<const CacheMode*> cache_modes(bool cross);
/// Throws Error{unsupported} naming the known modes.
const CacheMode& find_cache_mode(const std::string& name, bool cross);
/// The levels of a mode with has_levels() by parse_levels(); of an empty text its own default. Throws the
/// same, and Error{argument} for what this mode does not have.
Levels read_levels(const CacheMode& mode, const std::string& text);
/// A mode by its name, and legal for this layer: else Error{cache_unsupported} naming the layer, the reason
/// and the modes that would work.
const CacheMode& require_cache_mode(const std::string& name, const AttnConfig& config);

}  // namespace slimrt
