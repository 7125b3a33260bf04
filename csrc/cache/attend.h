// What modes build attention of: projections, terms, and the two branches of modes that absorb weights.
#pragma once

#include <initializer_list>

#include "cache/cache_mode.h"

namespace slimrt {

/// A plane whose rows are read whole: in one piece, or in one a head where the type has scales, which each
/// head needs for itself.
Plane whole_plane(const char* name, int width, int heads, DType type);

/// x W^T (+ bias) of each projection in new scratch, in one product, since all read the same x.
std::vector<Tensor> project(Backend& backend, Scratch& scratch, Tensor x,
                            std::span<const Projection> projections);
inline std::vector<Tensor> project(Backend& backend, Scratch& scratch, Tensor x,
                                   std::initializer_list<Projection> projections) {
    return project(backend, scratch, x, std::span(projections.begin(), projections.size()));
}

/// Clamps rows of q, k or v, where the model does.
void clamp(Backend& backend, const AttnConfig& config, std::span<const Tensor> rows);

/// QK-norm, where the model has it: out = norm(x), contiguous q or k [n, heads * head_dim]; out may be x.
void norm_heads(Backend& backend, const AttnConfig& config, Tensor weight, Tensor x, Tensor out);

/// Norms V [n, heads * head_dim] in place, where the model does.
void norm_values(Backend& backend, const AttnConfig& config, Tensor v);

/// Arguments of Backend::attention; they refer to the terms.
AttentionArgs attention_args(const ReadInput& in, std::span<const ScoreTerm> scores,
                             std::span<const ValueTerm> values);

/// x as it reads back from a plane, rounded to its type; x itself where that is exact.
Tensor as_stored(Backend& backend, Scratch& scratch, Tensor x, const Plane& plane);

/// Cross-attention: why modes that compute `what` from K are refused; empty where K is wide enough.
std::string narrow_encoder_k(const AttnConfig& config, const char* what);

/// to = from; both may have any stride.
void copy_rows(Backend& backend, Tensor from, Tensor to);

/// Why modes are refused whose rows lack K's bias (or that of columns which do not rotate): it shifts all
/// scores of a query alike, but not where scores are capped. Empty without a cap.
std::string capped_without_bias(const AttnConfig& config);

/// A mode that reads rows in two ways. Absorbed attention multiplies whole rows with queries that contain the
/// weight: n_heads times the arithmetic for each query. Materialising computes K and V of the stored rows,
/// once for all queries; it pays from about head_dim queries on (docs/cache-math.md). A step is divided into
/// parts: absorbed ones have at most head_dim tokens, which bounds scratch; a materialised one is of one
/// sequence. Chunks are always materialised, since their append is long, an encoder's rows always absorbed.
class AbsorbingMode : public CacheMode {
  public:
    Written write(Backend& backend, const WriteInput& in) const final;
    void read(Backend& backend, const ReadInput& in, const Written& written, Tensor out) const final;

  protected:
    /// As write(), but may leave Written::dense and x empty.
    virtual Written write_rows(Backend& backend, const WriteInput& in) const = 0;
    /// read() of an absorbed part.
    virtual void absorbed(Backend& backend, const ReadInput& in, const Written& own, Tensor out) const = 0;

    /// Rows of the planes of dense_format(), f32: of a part's own tokens, exact, where write_rows() left them
    /// out; and of the stored positions [begin, end) of its sequence.
    virtual std::vector<Tensor> dense_of(Backend& backend, const AttnInput& in, const Written& own) const = 0;
    virtual void dense_of_stored(Backend& backend, const ReadInput& in, int64_t begin, int64_t end,
                                 const std::vector<Tensor>& planes) const = 0;
    /// read() of a materialised part, over in.dense and own.dense. Here their planes are K and V.
    virtual void materialised(Backend& backend, const ReadInput& in, const Written& own, Tensor out) const;

  private:
    void materialise(Backend& backend, const ReadInput& in, Written own, Tensor out) const;
    void materialise_before(Backend& backend, const ReadInput& in) const;
};

/// Type of DenseRows beside stored rows of a type: f32 stays exact, bf16 keeps its range; else f16.
DType dense_type(DType stored);

/// Positions first, first + 1, ... as [1, n] I32 in scratch.
Tensor positions_from(Backend& backend, Scratch& scratch, int64_t first, int64_t n);

/// A dense tensor as stored rows: row i is position first + i.
Rows dense_rows(Tensor t, int64_t first);

}  // namespace slimrt
