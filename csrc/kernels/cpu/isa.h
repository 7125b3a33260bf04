// What one instruction set must provide: single-threaded kernels over rows. The sources linear.cpp,
// quant.cpp, elementwise.cpp, cache_rows.cpp and attention*.cpp (not _plan, _run) are compiled once per ISA,
// each time into a namespace of its own (SLIMRT_ISA), and export exactly one symbol: the table. They include
// no standard header with inline code, since an inline function shared with a baseline unit could be linked
// in its AVX-512 form.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "core/dtype.h"
#include "kernels/cpu/access.h"

namespace slimrt::cpu {

/// Rows that products of several tokens may take side by side, at most: where a share of the rows ends, so
/// that none is multiplied in another way for it.
inline constexpr int64_t kPanelRows = 32;

/// Products of stored weight rows with activation rows, for one weight type.
struct LinearKernel {
    uint32_t weight_type;  // DType
    int64_t min_tokens;    // of several kernels for a type, the first in the list that takes so few serves
    /// Bytes of one activation row of k elements once packed, and the packing (for f32 activations: a copy is
    /// not needed, pack is nullptr and x is read as it is).
    size_t (*packed_bytes)(int64_t k);
    void (*pack)(const float* x, int64_t k, void* out);
    /// out[t * out_stride + r] = w[r] . x[t], r < n_rows, t < n_tokens; strides of w and x in bytes, of out
    /// in floats. access: of one token.
    void (*product)(const void* w, size_t w_stride, int64_t n_rows, const void* x, size_t x_stride,
                    int64_t n_tokens, int64_t k, float* out, size_t out_stride, Access access);
};

/// Rows of consecutive heads of one block of stored rows, as a kernel reads them: row i of head h has its
/// elements at data + h * head_stride + i * stride and its scales at scales + h * head_stride + i * (scales
/// of a row); or (by_channel) those of the channels of all rows there. `next`: what will be read after the
/// last head, or nullptr.
struct BlockRows {
    uint32_t type;  // DType, any that a cache row may have
    const void *data, *scales, *next;
    size_t head_stride, stride;
    int64_t dim;
    bool by_channel = false;
};

/// A query as attend_block() may want it beside the floats, for rows of Q8: q = scale * (128 high + low),
/// rounded to about 15 bits (a little less of rows so wide that sums would overflow), so that q's own
/// rounding does not matter beside that of the rows. The digits follow: high, then low, each
/// packed_digits(dim) bytes.
struct PackedQuery {
    float scale;
    int32_t total, unused[14];  // of start
    int32_t start[16];          // what raising the codes by 128 adds to each sum, times -1
};
inline constexpr int64_t packed_digits(int64_t dim) { return (dim + 63) / 64 * 64; }
inline constexpr int64_t packed_query_bytes(int64_t dim) {
    return static_cast<int64_t>(sizeof(PackedQuery)) + 2 * packed_digits(dim);
}

/// How keys that are stored before RoPE are turned: `first` are cos, sin pairs of the block's first row, and
/// turns [kBlockTokens][cos, sin][n_rot / 2] what the next rows are turned by beside it. Whole vectors:
/// n_rot is a multiple of 32.
inline constexpr int64_t kMaxRotatedDim = 512;  // of a head
struct BlockRope {
    const float *first = nullptr, *rotations = nullptr;
    int64_t n_rot = 0;
    bool interleaved = false;
};

/// A step of online softmax: n_q queries of each of n_heads heads of v over the `n` rows of a block, n <=
/// kBlockTokens; each of them has k_heads heads of k, for n_q / k_heads of the queries. q
/// [head][query][k.dim]; max, sum [head][query] and values [head][query][values_stride] are updated, values
/// only read where sum is not 0. rows: scratch of kBlockTokens * rows_stride floats. packed_q [head][query]:
/// for k of Q8, by pack_query().
struct BlockAttention {
    BlockRows k, v;
    BlockRope rope;  // of k by_channel
    int64_t n, n_heads, n_q, k_heads;
    const float* q;
    const void* packed_q;
    float scale, score_cap;  // see finish_scores()
    const float* bias;       // of the first head's first query and the first row, or nullptr
    size_t bias_stride;      // from head to head; the next query's is one float before
    int64_t n_queries;       // of one query head: what n_q is a multiple of
    float *max, *sum, *values;
    size_t values_stride;
    float* rows;
    size_t rows_stride;
    Access access;
    float* keys = nullptr;  // as values, of the rows of k, its k_heads side by side; or nullptr
    size_t keys_stride = 0;
    bool accumulate = false;  // scores are added to what is there
};

/// A query for rows that are turned in 16 bits: with the channels' static scales, so that what it becomes is
/// at most 2^15 - 2 however it is turned. The floats follow, rotated_dim(dim) each: q, then q by a right
/// angle.
struct RotatedQuery {
    float unit, unused[15];
};
inline constexpr int64_t rotated_dim(int64_t dim) { return (dim + 31) / 32 * 32; }
inline constexpr int64_t rotated_query_floats(int64_t dim) {
    return static_cast<int64_t>(sizeof(RotatedQuery) / sizeof(float)) + 2 * rotated_dim(dim);
}

// Rows that are values for every query head (absorbed: modes k, k+r, x, xr, e), a few blocks at a time, by
// integer products if they are fast. Pairs are (head, query).

/// The most, see AttentionPlan::absorbed_rows.
inline constexpr int64_t kAbsorbedBlocks = 8, kAbsorbedRows = kAbsorbedBlocks * kBlockTokens;
/// Columns of rows of 4 bits that have a scale of their own, and of how many scales offsets are found at
/// once.
inline constexpr int64_t kQ4Columns = 32, kMaxOffsets = 16;

/// A weight that stands out: in few bits the others beside it would vanish.
struct Outlier {
    int32_t pair, row;
    float weight;
};
inline constexpr int64_t kMaxOutliers = 16;  // of a pair at a time
/// A pair's weights so far: the sum of the squares of all but the largest that was set aside, its square, and
/// of rows of codes how many are not 0.
struct WeightStats {
    float squares, largest, rows;
};

/// Floats that absorb_values() takes for the weights of so many pairs.
inline constexpr int64_t weight_floats(int64_t pairs) {
    constexpr int64_t each =
        kAbsorbedRows + kAbsorbedRows / 2 + kBlockTokens + 3 + kMaxOffsets + kMaxOutliers;
    return (pairs + 15) / 16 * 16 * each;
}

/// out[pairs[pair]] = factor[pair] * the same + sum of p[pair][i] * row i + what is set aside, over the rows
/// [first, first + n) of whole rows of `heads` stored heads of `dim` columns. Where factor is 0, out need not
/// have been written before; it has room for 16 columns past the last whole 16. weights: scratch of
/// weight_floats(n_pairs). exact: rows are summed as floats.
struct AbsorbedValues {
    uint32_t type;  // DType, any that a cache row may have
    bool exact;
    const void* blocks[kAbsorbedBlocks];  // the first stored head of each; nullptr: none of its rows are here
    const void* next[kAbsorbedBlocks];
    size_t head_stride;
    int64_t heads, dim, first, n, n_pairs;
    int64_t rows;          // first + n are no more: whole vectors of any kind
    const int32_t* pairs;  // whose out a pair here has
    const float* p;        // [pair][kAbsorbedRows], of which `rows` are used: 0 where no row is
    const float* factor;
    const Outlier* outliers;  // in the order of pairs
    int64_t n_outliers;
    float* weights;
    float* out;
    size_t out_stride;
};

/// The turns of kTurnRows rows for kRotationColumns columns lie together: of each row cosines, then sines.
/// Those of rows of Q8 are integers, times 2^15 - 1, others floats: how many floats a block's take.
inline int64_t row_rotation_floats(bool integers, int64_t dim) {
    return kBlockTokens * rotated_dim(dim) * (integers ? 1 : 2);
}
inline constexpr int64_t kTurnRows = 16, kRotationColumns = 32;
template <class Short>  // inline where code is small too: it would be one function for all ISAs
[[gnu::always_inline]] inline Short* rotation_at(Short* rotations, int64_t dim, int64_t row, int64_t column) {
    return rotations + row / kTurnRows * kTurnRows * 2 * dim +
           column / kRotationColumns * kTurnRows * 2 * kRotationColumns +
           row % kTurnRows * 2 * kRotationColumns + column % kRotationColumns;
}

/// Scores of rows of a block that are turned (or not) as they are read, of n_heads heads with n_q queries
/// each: out[pair * ld + i] (+)= unit of the query * q . row i. The query is turned instead: by what its
/// block's first row is, then by what row i is beside it; of Q8 in 16 bits.
struct RotatedScores {
    uint32_t type;              // DType, any that a cache row may have
    const void *data, *scales;  // of the first head
    size_t head_stride;         // bytes from head to head; 0: they are columns of one stored head
    size_t stride;              // from row to row
    int64_t n, n_heads, n_q, dim, stored_dim;
    const RotatedQuery* q;    // of the first pair, rotated_query_floats(dim) apart
    const float* first;       // cosines, then sines of the first row, rotated_dim(dim) each
    const void* rotations;    // cosines and sines of kBlockTokens rows: see rotation_at()
    const void* next;         // of whole rows: kBlockTokens that will be read next, or nullptr
    const float* factors;     // of each row, or nullptr
    int64_t factors_of_head;  // from head to head; 0: one for all
    bool accumulate;
    float* out;
    size_t ld;
};

/// From the weights of one pair to those of the next: not a multiple of a page, which would all compete for
/// the same few places of the cache.
inline constexpr int64_t kStretchStride = kStretchRows + 16;

/// What skip_weights() left out: the sum of the weights, and of what the budget counts.
struct SkippedWeights {
    float mass, used;
};

/// Some rows of a plane for one pair, in any order: what is at `data` and `scales` bytes behind the first
/// stored head's first row, and their weights.
struct ListedRows {
    const int64_t *data, *scales;
    const float* p;
    int64_t n;
    float* out;
};

/// out += sum of p[i] * row i of each list, whole rows of `heads` stored heads of `dim` columns. rows:
/// scratch of kBlockTokens * rows_stride floats.
struct ListedValues {
    uint32_t type;
    const void* base;
    size_t head_stride;
    int64_t heads, dim, n_lists;
    const ListedRows* lists;
    float* rows;
    size_t rows_stride;
};

/// values[query] += sum over n <= kBlockTokens rows of one head of p[query * ld + index[i]] * row[i]. Row i
/// has its elements at data[i] and its scales at scales[i]; rows: as above.
struct KeptRows {
    uint32_t type;
    int64_t dim, n, n_q;
    const void *const *data, *const *scales;
    const int32_t* index;
    const float* p;
    size_t ld;
    float* values;
    size_t values_stride;
    float* rows;
    size_t rows_stride;
};

/// The single-threaded kernels of one instruction set.
struct Isa {
    const char* name;
    const LinearKernel* linear;  // terminated by an entry whose product is nullptr
    /// The arithmetic that bounds products with this type of weight, for benchmarks: that many rounds of dot
    /// products of registers; returns the multiply-adds. `out` takes a vector, so that they happen.
    int64_t (*busy)(uint32_t type, int64_t rounds, float* out);

    /// The largest of n numbers (but for the last, fewer than 64), to be told how fast memory is read: by
    /// whole vectors, since each part of a line would be a load of its own.
    float (*read)(const float* from, int64_t n, Access access);

    /// Any readable type to f32 (type is a DType; n a multiple of its block).
    void (*unpack)(uint32_t type, const void* from, int64_t n, float* to);
    /// f32 to F32, F16 or BF16 (round to nearest even).
    void (*narrow)(uint32_t type, const float* from, int64_t n, void* to);

    float (*inverse_rms)(const float* x, float eps, int64_t n);
    void (*rms_norm)(const float* x, const float* weight, float eps, int64_t n, float* out);
    void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int64_t n,
                       float* out);
    /// One head's row; cs = cos, sin pairs of its position.
    void (*rope)(float* x, const float* cs, int64_t n_rot, bool interleaved);
    void (*activate)(uint32_t kind, float* x, int64_t n);  // kind: Activation
    void (*gate)(uint32_t kind, float* gate, const float* up, int64_t n);
    void (*add)(float* x, const float* y, int64_t n);
    void (*multiply)(float* x, const float* y, float factor, int64_t n);  // x *= factor * y

    /// One head of a row to a type of cache rows.
    void (*store_head)(uint32_t type, const float* from, int64_t dim, void* to, void* scales);
    /// Columns [first, first + n) of one head of n_rows rows, from_stride bytes apart, to_stride floats
    /// apart.
    void (*load_head)(uint32_t type, const void* from, size_t from_stride, const void* scales, int64_t n_rows,
                      int64_t dim, int64_t first, int64_t n, float* to, size_t to_stride);

    // The same of at most kBlockTokens rows that have a scale for each channel.

    /// Rows from_stride floats apart; of `to` without gaps.
    void (*store_channels)(uint32_t type, const float* from, size_t from_stride, int64_t n_rows, int64_t dim,
                           void* to, void* scales);
    void (*load_channels)(uint32_t type, const void* from, size_t from_stride, const void* scales,
                          int64_t n_rows, int64_t dim, int64_t first, int64_t n, float* to, size_t to_stride);

    /// To packed_query_bytes(dim), of multiples of 64.
    void (*pack_query)(const float* q, int64_t dim, void* to);
    void (*attend_block)(const BlockAttention& block);

    // The same in steps, so that the values of rows of little weight are not read.

    /// s[(head * n_q + query) * ld + i] = the finished scale * q . k[i]
    void (*score_block)(const BlockAttention& block, float* s, size_t ld);
    /// Marks rows, so that the weights p of those unmarked add up to at most `share` of all n. Marks stay.
    void (*keep_rows)(const float* p, int64_t n, float share, uint8_t* keep);
    void (*add_kept_values)(const KeptRows& kept);

    // Absorbed rows.

    /// Makes weights 0, none smaller being left, that add up (squared: whose squares do) to at most `budget`.
    SkippedWeights (*skip_weights)(float* p, int64_t n, float budget, bool squared);
    void (*add_listed_values)(const ListedValues& values);

    // Absorbed rows of Q8.

    void (*score_rotated)(const RotatedScores& scores);
    /// Takes weights that stand out beside all others of a pair so far out of its next n: how many. Those
    /// before, zeros at first, are worth `factor` of what they were. codes: as much as weights of rows of
    /// codes want it, of which few bits are left.
    int64_t (*extract_outliers)(float* p, int64_t n, bool codes, int32_t pair, float factor,
                                WeightStats* stats, Outlier* to);
    void (*absorb_values)(const AbsorbedValues& values);

    // One tile of attention: `n` rows of F32, F16 or BF16, `stride` bytes apart.

    /// scores[m * ld + i] (+)= scale * q[m] . rows[i]; q row m at q + m * q_stride, dim elements.
    void (*scores)(const float* q, size_t q_stride, int64_t n_q, uint32_t type, const void* rows,
                   size_t stride, int64_t n, int64_t dim, float scale, bool accumulate, float* out,
                   size_t ld);
    /// What is left to do for scores, scale * q . row, of one query: the cap (0: none), then the bias (or
    /// nullptr), see AttentionArgs.
    void (*finish_scores)(float* s, int64_t n, float cap, const float* bias);
    /// Online softmax of one row of a tile: given the running maximum and sum, replaces s by exp(s - max'),
    /// updates both, and returns the factor exp(max - max') for what was accumulated before: 0 at first, when
    /// the maximum is -inf.
    float (*softmax)(float* s, int64_t n, float* max, float* sum);
    /// out[m] = factor[m] * out[m] + sum_i p[m * ld + i] * rows[i], dim elements. Where factor[m] is 0,
    /// out[m] need not have been written before.
    void (*values)(const float* p, size_t ld, int64_t n_q, const float* factor, uint32_t type,
                   const void* rows, size_t stride, int64_t n, int64_t dim, float* out, size_t out_stride);
};

/// Whether it has products with weights of this type.
bool multiplies(const Isa& isa, DType type);

/// The tables in this build that this CPU can run, best first. Never empty.
const Isa* const* supported_isas(int* n);

/// What was best where it was measured, of products of one token with codes of few bits, whose arithmetic is
/// worth as much as memory, and of cached rows. Of these some CPUs want the first-level cache alone: on Zen 5
/// a line on its way from memory, and again from the second level, takes two of the few places for lines on
/// their way. Intel's cores then fetch a third of what they do otherwise (Cascade Lake: 6 instead of 16
/// GB/s).
Access usual_access_of_codes();
Access usual_access_of_rows();

}  // namespace slimrt::cpu
