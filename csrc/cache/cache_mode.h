// The one contract that matters: (x, attention weights) -> attention output. A cache mode decides which
// projections happen, what one token leaves behind in one layer, and how attention reads it back: an owner
// writes, it and any layer that shares its rows read. The rows of cross-attention are the same, but for their
// owner: the encoder. Modes are stateless and const; memory belongs to KvCache.
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
/// Latent attention (MLA): K and V are made of a latent, which is beside columns that rotate all that a token
/// leaves; of a head the last n_rot columns rotate, and V may be narrower than K.
struct AttnConfig {
    int layer = 0;
    bool cross = false;  // over the rows of an encoder's output, all of which a query sees
    int d_model = 0, n_heads = 0, n_kv_heads = 0, head_dim = 0;
    bool rope = false;
    int n_rot = 0;                     // columns of a head that rotate, from its first on; 0 without RoPE
    std::optional<float> qk_norm_eps;  // norm of q and k before RoPE, of whole rows; or none
    NormKind qk_norm_kind = NormKind::rms;
    bool norms_heads = false;  // of each head by itself
    bool norms_v = false;      // each head of V by itself, by RMS and without a weight; with QK-norm of heads
    bool v_is_k = false;       // V is K before its norm and RoPE
    int64_t window = 0;
    DType type_k = DType::F16, type_v = DType::F16;
    int rank = 0;  // width of a residual, modes with one; and its type
    DType type_r = DType::F16;
    int v_heads = 0;       // of modes that compute V: the last KV heads, whose V is kept beside K
    Levels levels;         // of modes with some; none: one, of the types above
    int latent_heads = 1;  // KV heads that share a latent, see modes/lowrank.cpp
    float sparse_threshold = 0, sparse_delta = 0;  // see AttentionArgs
    float clamp = 0;                               // 0: none, else q, k and v are clamped to it
    float scale = 1;                               // of scores
    float score_cap = 0;                           // 0: none, see AttentionArgs
    bool sinks = false;                            // AttnWeights has some
    int latent = 0;                                // width of the latent, or 0
    int value_dim = 0;                             // of V's heads, with a latent
    float latent_eps = 0;                          // of the latent's norm

    int norm_width() const { return norms_heads ? head_dim : kv_width(); }  // of what keys are normed over
    int q_width() const { return n_heads * head_dim; }
    int kv_width() const { return n_kv_heads * head_dim; }
    int computed_width() const { return (n_kv_heads - v_heads) * head_dim; }      // of V that is not kept
    int value_width() const { return latent ? n_heads * value_dim : q_width(); }  // of attention's output
    int row_width() const { return latent + n_rot; }                              // with a latent
    bool mha() const { return n_heads == n_kv_heads; }
};

/// A model's own tensors of one attention.
struct AttnWeights {
    Tensor q, k, v, o;                      // [out, in], any native type; k and v none where rows are shared,
                                            // the same with AttnConfig::v_is_k
    Tensor q_bias, k_bias, v_bias, o_bias;  // f32 or none
    Tensor q_norm, k_norm;                  // f32, with AttnConfig::qk_norm_eps
    Tensor relative_bias;  // f32 [n_heads, n_ctx] or none: the last column is for a query's own token
    Tensor sinks;          // f32 [1, n_heads] or none, see AttentionArgs
    // Of latent attention: q = norm(x q_a^T) q^T; k [row_width, d_model] gives the latent, before k_norm, and
    // what rotates; K and V of a head are the latent times k_b^T [n_heads * latent, K's columns that do not
    // rotate] and v_b [n_heads * value_dim, latent], in old files one kv_b, head after head K's rows, V's.
    Tensor q_a, q_a_norm, k_b, v_b, kv_b;
};

/// A tensor that folding makes for a mode, blk.<layer>.<suffix> [rows, cols].
struct Fold {
    const char* suffix;
    int64_t rows, cols;
    bool required = true;  // else a fold may do without
    bool planned = true;   // whether a plan counts it while there is no fold yet
};

/// A tensor blk.<layer>.<suffix>, the model's own or folded, that decoding a token does not read.
struct Unread {
    const char* suffix;
    bool replaced;  // something as large that was made of it is read in its place
};

/// What a mode made of a layer's weights at load.
struct Prepared {
    explicit Prepared(const AttnWeights& weights) : model(weights) {}
    virtual ~Prepared() = default;
    /// A number for the folded tensors that rows are written with; 0 if there are none. Rows mean nothing
    /// beside others.
    virtual uint64_t fingerprint(Backend&) const { return 0; }

    AttnWeights model;
    std::vector<Buffer> owned;
};

struct PrepareInput {
    const AttnConfig& config;
    const AttnWeights& weights;
    const std::map<std::string, Tensor>& folded;  // by suffix, all of CacheMode::folds(); or none
    std::span<const float>
        encoder_channel_sizes;  // cross: about how large each channel of the encoder's output is
};

/// One stored part of a row: `heads` equal shares, which lie apart in a block and have scales of their own,
/// for each row or, with scale_tokens, for each channel of so many rows (see Rows).
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

/// Stored rows of another region than the newest (see Regions), of the same sequences, at positions counted
/// from `origin` on. No query is among them.
struct OlderRows {
    int c = 0;  // class
    int64_t origin = 0;
    std::vector<AttentionSequence> sequences;
};

/// What a step's tokens read and write in the layers of one group (see KvCache): their slots, and their
/// sequences with the group's block tables: sequences[i] owns the rows [query, query + n_queries).
struct GroupBatch {
    Tensor slots;  // [1, n] I32; none where rows go from DenseRows to the regions where they belong
    std::vector<AttentionSequence> sequences;
    std::vector<OlderRows> older;  // oldest first
};

/// The tokens of one step or of one chunk of it.
struct Batch {
    Tensor tokens, positions;                       // [1, n] I32
    std::vector<GroupBatch> groups;                 // the same sequences in each
    std::vector<AttentionSequence> encoder_states;  // with an encoder: rows of its output that each sees
    int sequence = -1;                              // of KvCache, if it is one alone
    bool chunk = false;  // of a longer append of one sequence, each layer going through all chunks
};

/// What the materialised branch of a mode reads in place of stored rows: made once per layer and append, rows
/// by position.
struct DenseRows {
    std::vector<Tensor> planes;      // [n_ctx, width]
    const int32_t* table = nullptr;  // block table of the sequence whose they are
    int64_t end = 0;                 // positions from here on are not there yet
};

/// Rows that change their class: [begin, end) at `table` in views of the planes of one, and the views of the
/// other with their slots, which are [to_begin, ...) at `to_table`. Whole blocks of it, unless that is class
/// 0. Rows of another class than that, or than dense ones, have aged.
struct Recoding {
    std::span<const Rows> from;
    const int32_t* table;
    int64_t begin, end;
    std::span<const Slots> to;
    const int32_t* to_table = nullptr;
    int64_t to_begin = 0;
    bool from_aged = false, to_aged = true;
};

/// OlderRows as one layer reads them: with a view for each plane of their class.
struct StoredRegion {
    bool aged;  // else sinks: of class 0
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
    std::span<const AttentionSequence> sequences;  // none of an encoder's output, which is only written
    bool chunk;                                    // see Batch
    Scratch& scratch;
};

struct WriteInput : AttnInput {
    Tensor x;                       // [n, d_model], normed, or an encoder's output
    std::vector<Tensor> projected;  // x times each of CacheMode::projections()
    bool shared = false;            // other layers read it too, after x is gone; scratch lives until the last
};

/// What a step's tokens leave behind in an owner's layer, in scratch; all none for an encoder's rows, which
/// no step writes.
struct Written {
    std::vector<Tensor> planes;     // [n, width] f32, of each plane of the format: these are stored
    std::vector<Tensor> read_back;  // the same as readers take them for values, where it differs
    std::vector<Tensor> dense;  // rows of each of CacheMode::dense_format(); or none: made of x when needed
    Tensor x;                   // the owner's

    Tensor plane(size_t i) const { return i < planes.size() ? planes[i] : Tensor{}; }
    Tensor value(size_t i) const { return i < read_back.size() ? read_back[i] : plane(i); }
    Written rows_of(int64_t first, int64_t n) const;
};

struct ReadInput : AttnInput {
    Tensor relative_bias, sinks;          // of the reader, as in AttnWeights
    const std::vector<Rows>& rows;        // what is stored, a view for each plane
    std::span<const StoredRegion> older;  // and in older regions, oldest first
    DenseRows& dense;
    Tensor q;  // [n, q_width], biased, normed and rotated
};

struct Projection {
    Tensor weight, bias;
};

/// A step that the planner tries: n tokens of one sequence, `cached` ones before them.
struct Extreme {
    int64_t n, cached;
};

class CacheMode {
  public:
    virtual ~CacheMode() = default;
    virtual const char* name() const = 0;
    /// Whether it is one of self-attention's modes, or one of cross-attention's.
    virtual bool serves(bool cross) const { return !cross; }
    /// Why this mode is not exact for this attention, whose q, k and v are not clamped; empty when it is
    /// legal.
    virtual std::string refusal(const AttnConfig& config) const = 0;
    virtual Format format(const AttnConfig& config) const = 0;
    /// What older rows are stored in, the newer ones first; none where rows stay as they are written. And how
    /// a text divides.
    virtual std::vector<Format> older_formats(const AttnConfig&) const { return {}; }
    virtual Regions regions(const AttnConfig&) const { return {}; }
    /// Rows to another class, plane by plane. May take recoding_scratch() bytes.
    virtual void recode(Backend& backend, const AttnInput&, const Recoding& r) const {
        for (size_t plane = 0; plane < r.to.size(); ++plane)
            backend.recode(r.from[plane], r.table, r.begin, r.end, r.to[plane]);
    }
    virtual size_t recoding_scratch(const AttnConfig&) const { return 0; }
    /// The planes of DenseRows; none where many queries read stored rows as they are. Modes with older rows
    /// have them, plane for plane of a row, so that a prompt is exact however it is stored.
    virtual Format dense_format(const AttnConfig&) const { return {}; }
    /// Whether rows have a part of AttnConfig::rank columns and a type of its own.
    virtual bool has_residual() const { return false; }
    /// Whether some heads may keep V (AttnConfig::v_heads).
    virtual bool has_v_heads() const { return false; }
    /// Whether AttnConfig::levels say what rows become as they age; and what they are where nothing says it.
    virtual bool has_levels() const { return false; }
    virtual Levels usual_levels() const { return {}; }
    /// Whether not V is stored, but a latent of it, which keys may predict (Levels::predicts).
    virtual bool has_latents() const { return false; }
    /// Whether a sparse_threshold has something to spare: values that are not needed for scores too,
    virtual bool has_values_alone() const { return false; }
    /// or that all heads read, for which a head's part costs as many products as there are heads.
    virtual bool has_values_of_all() const { return false; }
    /// Whether rows know the bias of V. Else W_O b_V belongs to the output's, since softmax weights sum to 1.
    virtual bool keeps_v_bias() const { return false; }
    /// Whether it is for latent attention, else for any other.
    virtual bool for_latent_attention() const { return false; }
    /// Of an encoder's output: whether one layer's rows serve all.
    virtual bool shared() const { return false; }

    /// The tensors that folding makes for it.
    virtual std::vector<Fold> folds(const AttnConfig&) const { return {}; }
    /// What decoding a token does not read of a layer.
    virtual std::vector<Unread> unread(const AttnConfig&) const { return {}; }
    /// The projection that folding inverts, "W_K" or "W_V", which amplifies the rounding of rows; or none.
    virtual const char* inverts() const { return ""; }
    /// Derived weights, once at load.
    virtual std::unique_ptr<Prepared> prepare(Backend&, const PrepareInput& in) const {
        return std::make_unique<Prepared>(in.weights);
    }

    /// What write() needs x multiplied with: one product, and with the q of the owner's own layer.
    virtual std::vector<Projection> projections(const Prepared&) const { return {}; }
    /// Owner: x -> what the tokens leave behind. The caller stores the planes.
    virtual Written write(Backend& backend, const WriteInput& in) const = 0;
    /// Reader: out [n, value_width] = attention of the tokens over stored and written rows, before W_O.
    /// Written rows are used in full precision.
    virtual void read(Backend& backend, const ReadInput& in, const Written& written, Tensor out) const = 0;
    /// Cross-attention: K [n, kv_width] of stored rows [n, width] of the first plane.
    virtual Tensor keys(Backend&, const Prepared&, Scratch&, Tensor rows) const { return rows; }

    /// Steps that need as much scratch as any, where one sequence has at most `longest` of a step's tokens:
    /// many queries over a full context, the same over nothing, and few.
    virtual std::vector<Extreme> extremes(const AttnConfig& config, int64_t longest, int64_t n_ctx) const;
};

/// The same of any attention.
std::string refusal_of(const CacheMode& mode, const AttnConfig& config);

/// The modes of one of the two kinds of attention, in the order they are tried and shown. registry.cpp.
std::vector<const CacheMode*> cache_modes(bool cross);
/// Throws Error{unsupported} naming the known modes.
const CacheMode& find_cache_mode(const std::string& name, bool cross);
/// Levels of a mode that has some, as parse_levels(); none said: as usual. Throws the same, and
/// Error{argument} for what is not of this mode.
Levels read_levels(const CacheMode& mode, const std::string& text);
/// A mode by its name, and legal for this layer: else Error{cache_unsupported} naming the layer, the reason
/// and the modes that would work.
const CacheMode& require_cache_mode(const std::string& name, const AttnConfig& config);

}  // namespace slimrt
