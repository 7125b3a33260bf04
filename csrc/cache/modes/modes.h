// The registered modes and what they have in common.
#pragma once

#include "cache/cache_mode.h"

namespace slimrt {

const CacheMode* kv_mode();
const CacheMode* k_mode();
const CacheMode* kr_mode();
const CacheMode* v_mode();
const CacheMode* x_mode();
const CacheMode* xr_mode();

/// A plane whose rows are read whole: in one piece, unless the type has scales, one of which each head needs.
Plane whole_plane(const char* name, int width, int heads, DType type);

struct Projection {
    Tensor weight, bias;
};
/// x W^T (+ bias) of each in fresh scratch, all at once, since they read the same x.
std::vector<Tensor> project(Backend& backend, Scratch& scratch, Tensor x,
                            std::initializer_list<Projection> projections);
/// q of the step's tokens, biased, normed and rotated where the model does so; then the other projections of
/// x.
std::vector<Tensor> project_q_and(Backend& backend, const AttnInput& in,
                                  std::initializer_list<Projection> others);

/// Attention with these terms, which must outlive the result.
AttentionArgs attention_args(const AttnInput& in, std::span<const AttentionSequence> sequences,
                             std::span<const ScoreTerm> scores, std::span<const ValueTerm> values);

/// x as it will be read back from a plane; x itself where that is the same.
Tensor as_stored(Backend& backend, Scratch& scratch, Tensor x, const Plane& plane);

/// linear_per_head, the weight's heads shared by groups of query heads (GQA).
void linear_heads(Backend& backend, const AttnConfig& config, Tensor x, Tensor weight, Tensor out);

/// A vector of V's width for the heads that the query heads read: [q width].
std::vector<float> for_query_heads(const AttnConfig& config, const std::vector<float>& v);

/// Adds W_O b_V to the output bias and drops b_V, since softmax weights sum to 1. For modes whose rows know
/// no V bias.
void fold_v_bias(Backend& backend, const AttnConfig& config, AttnWeights& weights);

/// Sets weights.absorbed_q: weight [kv width, row width] per query head transposed, [n_heads * row width,
/// head_dim] f32, which takes a head's q to a query against a whole row. The first `left_out` columns of a
/// head count for nothing.
void absorb_q(Backend& backend, const AttnConfig& config, Tensor weight, AttnWeights& weights,
              int left_out = 0);

/// A vector of prepare()'s own making, from host memory; f32 [1, n].
Tensor derived_vector(Backend& backend, AttnWeights& weights, const std::vector<float>& values,
                      const char* what);
/// Values of an f32 vector; on a dry backend zeros.
std::vector<float> values_of(Backend& backend, Tensor vector);

/// Loads the static scales of a row's channels, where there are any, and makes 1 / them. A plan supposes them
/// for types that have scales of their own.
void load_row_scale(Backend& backend, const AttnConfig& config, DerivedWeights& derived, const char* suffix,
                    int64_t width, AttnWeights& weights);

/// Consecutive sequences of a step that take the same branch of an absorbed mode; queries count from `first`.
struct Part {
    bool absorb = false;
    int first = 0, n = 0;
    std::vector<AttentionSequence> sequences;

    Tensor of(Tensor t) const { return t.rows_of(first, n); }
};

/// Absorbed attention pays for few queries only: a query costs n_heads times the arithmetic, where
/// materialising costs one product of the stored rows with a weight (break-even near head_dim queries,
/// cache-math section 1). Absorbed parts have at most head_dim tokens, so scratch is bounded; a materialised
/// part is one sequence. A chunk is materialised however short it is, since its append is long.
std::vector<Part> split_by_branch(const AttnInput& in);

/// Computes each part by the branch that pays, and gives back the scratch it took.
using Branch = std::function<void(const Part&)>;
void each_part(const AttnInput& in, const Branch& absorbed, const Branch& materialised);

/// Type of a plane of AttnInput::dense beside stored rows of this type: f32 stays exact, bf16 keeps its
/// range.
DType dense_type(DType stored);

/// Fills a dense plane's rows of the stored positions [begin, end), each [end - begin, width] f32.
using Materialise = std::function<void(int64_t begin, int64_t end, const std::vector<Tensor>& planes)>;

/// Makes the dense rows of the positions before a materialised part that are not there yet.
void materialise_before(Backend& backend, const AttnInput& in, const Part& part, const Materialise& make);
/// Adds the part's own rows, f32, for the chunks that follow.
void keep_dense(Backend& backend, const AttnInput& in, const Part& part, const std::vector<Tensor>& fresh);

/// 0, 1, 2 ... as positions first, first + 1, ... in scratch.
Tensor positions_from(Backend& backend, Scratch& scratch, int64_t first, int64_t n);

/// A dense tensor as stored rows: row i is position first + i.
Rows dense_rows(Tensor t, int64_t first);

}  // namespace slimrt
