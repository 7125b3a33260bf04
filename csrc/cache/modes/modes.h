// The registered modes and what they have in common.
#pragma once

#include "cache/cache_mode.h"

namespace slimrt {

const CacheMode* kv_mode();
const CacheMode* k_mode();
const CacheMode* v_mode();
const CacheMode* x_mode();

/// A plane whose rows are read whole: in one piece, unless the type has scales, one of which each head needs.
Plane whole_plane(const char* name, int width, int heads, DType type);

/// x W^T (+ bias) in fresh scratch.
Tensor project(Backend& backend, Scratch& scratch, Tensor x, Tensor weight, Tensor bias);

struct Projection {
    Tensor weight, bias;
};
/// q of the step's tokens, biased, normed and rotated where the model does so; then the other projections of
/// x. All at once, since they read the same x.
std::vector<Tensor> project_q_and(Backend& backend, const AttnInput& in,
                                  std::initializer_list<Projection> others);

/// Attention with one term for scores and one for values, which must outlive the result.
AttentionArgs attention_args(const AttnConfig& config, std::span<const AttentionSequence> sequences,
                             const ScoreTerm& score, const ValueTerm& value);

/// linear_per_head, the weight's heads shared by groups of query heads (GQA).
void linear_heads(Backend& backend, const AttnConfig& config, Tensor x, Tensor weight, Tensor out);

/// Adds W_O b_V to the output bias and drops b_V, since softmax weights sum to 1. For modes whose rows know
/// no V bias.
void fold_v_bias(Backend& backend, const AttnConfig& config, AttnWeights& weights);

/// Sets weights.absorbed_q: weight [kv width, row width] per query head transposed, [n_heads * row width,
/// head_dim] f32, which takes a head's q to a query against a whole row.
void absorb_q(Backend& backend, const AttnConfig& config, Tensor weight, AttnWeights& weights);

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
std::vector<Part> split_by_branch(const AttnConfig& config, const Batch& batch);

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
