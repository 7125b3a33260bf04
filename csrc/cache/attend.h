// What modes compute attention with: projections, terms, and the two branches of those that absorb weights.
#pragma once

#include <initializer_list>

#include "cache/cache_mode.h"

namespace slimrt {

/// A plane whose rows are read whole: in one piece, unless the type has scales, one of which each head needs.
Plane whole_plane(const char* name, int width, int heads, DType type);

/// x W^T (+ bias) of each in fresh scratch, all at once, since they read the same x.
std::vector<Tensor> project(Backend& backend, Scratch& scratch, Tensor x,
                            std::span<const Projection> projections);
inline std::vector<Tensor> project(Backend& backend, Scratch& scratch, Tensor x,
                                   std::initializer_list<Projection> projections) {
    return project(backend, scratch, x, std::span(projections.begin(), projections.size()));
}

/// Of q, k or v, where they are clamped.
void clamp(Backend& backend, const AttnConfig& config, std::span<const Tensor> rows);

/// QK-norm, where there is one: out = norm(x) of q or k [n, heads * head_dim], in one piece; out may be x.
void norm_heads(Backend& backend, const AttnConfig& config, Tensor weight, Tensor x, Tensor out);

/// V [n, heads * head_dim], in place: where it is normed too.
void norm_values(Backend& backend, const AttnConfig& config, Tensor v);

/// Attention with these terms, which must outlive the result.
AttentionArgs attention_args(const ReadInput& in, std::span<const ScoreTerm> scores,
                             std::span<const ValueTerm> values);

/// x as it will be read back from a plane; x itself where that is the same.
Tensor as_stored(Backend& backend, Scratch& scratch, Tensor x, const Plane& plane);

/// Cross-attention: why modes that compute `what` from K refuse; empty where K is wide enough.
std::string narrow_encoder_k(const AttnConfig& config, const char* what);

/// to = from, both rows of any stride.
void copy_rows(Backend& backend, Tensor from, Tensor to);

/// Why modes refuse whose rows do not know K's bias, all of it or of columns that RoPE leaves alone; empty
/// where that bias shifts all scores of a query alike.
std::string capped_without_bias(const AttnConfig& config);

/// linear_per_head, the weight's heads shared by groups of query heads (GQA).
void linear_heads(Backend& backend, const AttnConfig& config, Tensor x, Tensor weight, Tensor out);

/// A mode that reads rows in two ways. Absorbed attention pays for few queries only: a query costs n_heads
/// times the arithmetic, where materialising costs one product of the stored rows with a weight (break-even
/// near head_dim queries, docs/cache-math.md). So a step is taken part by part: absorbed ones have at most
/// head_dim tokens, which bounds scratch; a materialised one is one sequence. A chunk is materialised however
/// short it is, since its append is long. An encoder's rows are always absorbed.
class AbsorbingMode : public CacheMode {
  public:
    Written write(Backend& backend, const WriteInput& in) const final;
    void read(Backend& backend, const ReadInput& in, const Written& written, Tensor out) const final;

  protected:
    /// write(), which need not give Written::dense and x.
    virtual Written write_rows(Backend& backend, const WriteInput& in) const = 0;
    /// read() of a part, by weights absorbed in q and after the softmax.
    virtual void absorbed(Backend& backend, const ReadInput& in, const Written& own, Tensor out) const = 0;

    /// Rows of the planes of dense_format(), f32: of a part's own tokens, in full precision, where
    /// write_rows() did not give them, and of the stored positions [begin, end) of its one sequence.
    virtual std::vector<Tensor> dense_of(Backend& backend, const AttnInput& in, const Written& own) const = 0;
    virtual void dense_of_stored(Backend& backend, const ReadInput& in, int64_t begin, int64_t end,
                                 const std::vector<Tensor>& planes) const = 0;
    /// read() of a part over in.dense and own.dense. Here: planes of K and V.
    virtual void materialised(Backend& backend, const ReadInput& in, const Written& own, Tensor out) const;

  private:
    void materialise(Backend& backend, const ReadInput& in, Written own, Tensor out) const;
    void materialise_before(Backend& backend, const ReadInput& in) const;
};

/// Type of a plane of DenseRows beside stored rows of this type: f32 stays exact, bf16 keeps its range.
DType dense_type(DType stored);

/// 0, 1, 2 ... as positions first, first + 1, ... in scratch.
Tensor positions_from(Backend& backend, Scratch& scratch, int64_t first, int64_t n);

/// A dense tensor as stored rows: row i is position first + i.
Rows dense_rows(Tensor t, int64_t first);

}  // namespace slimrt
