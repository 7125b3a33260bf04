// The interface of one instruction set: single-threaded kernels over rows. The sources linear.cpp, quant.cpp,
// elementwise.cpp, cache_rows.cpp and attention*.cpp (not _plan, _run, _decode, _absorbing, _sparing) are
// compiled once per ISA, each time into a namespace of its own (SLIMRT_ISA), and export exactly one symbol:
// the table. They include no standard header with inline code, since the linker could keep the AVX-512 form
// of an inline function for baseline units.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "core/dtype.h"
#include "kernels/cpu/access.h"

namespace slimrt::cpu {

/// The most weight rows that products of several tokens take side by side. Shares of threads end at multiples
/// of it, so that the number of threads does not change how a row is multiplied.
inline constexpr int64_t kPanelRows = 32;

/// Products of stored weight rows with activation rows, for one weight type.
struct LinearKernel {
    uint32_t weight_type;  // DType
    int64_t min_tokens;    // the first kernel of a type with min_tokens <= n_tokens is used
    /// Packs one row of k activations to packed_bytes(k); pack is nullptr for f32 activations, which are read
    /// as they are.
    size_t (*packed_bytes)(int64_t k);
    void (*pack)(const float* x, int64_t k, void* out);
    /// out[t * out_stride + r] = w[r] . x[t], r < n_rows, t < n_tokens; strides of w and x in bytes, of out
    /// in floats. access: how to prefetch for one token.
    void (*product)(const void* w, size_t w_stride, int64_t n_rows, const void* x, size_t x_stride,
                    int64_t n_tokens, int64_t k, float* out, size_t out_stride, Access access);
};

/// Consecutive heads of one block of stored rows: row i of head h has its elements at data + h * head_stride
/// + i * stride, its scales at scales + h * head_stride + i * (bytes of the scales of a row); or (by_channel)
/// there are the scales of the channels, for all rows. next: what is read after the last head, or nullptr.
struct BlockRows {
    uint32_t type;  // DType, any that a cache row may have
    const void *data, *scales, *next;
    size_t head_stride, stride;
    int64_t dim;
    bool by_channel = false;
};

/// A query for integer dot products with rows of Q8 or Q4: q = scale * (128 high + low), quantised to about
/// 15 bits (less for rows so wide that sums would overflow), so that its error is negligible beside that of
/// the rows. The digits follow the struct: high, then low, int8, packed_digits(dim) bytes each.
struct PackedQuery {
    float scale;
    int32_t total, unused[14];  // the sum of start
    int32_t start[16];          // undoes the bias of the codes: -128 * (sum of query codes), by lane
};
inline constexpr int64_t packed_digits(int64_t dim) { return (dim + 63) / 64 * 64; }
inline constexpr int64_t packed_query_bytes(int64_t dim) {
    return static_cast<int64_t>(sizeof(PackedQuery)) + 2 * packed_digits(dim);
}

/// Whether it meets rows of Q4 of this width, in groups of 32 columns.
inline constexpr int64_t kMaxFourBitGroups = 64;
inline constexpr bool packs_four_bits(int64_t dim) { return dim % 64 == 0 && dim / 32 <= kMaxFourBitGroups; }

/// Rotations for keys that are stored before RoPE. first: (cos, sin) pairs of the first row of the block;
/// rotations [kBlockTokens][cos, sin][n_rot / 2]: of each row relative to the first. n_rot is a multiple of
/// 32.
inline constexpr int64_t kMaxRotatedDim = 512;  // of a head
struct BlockRope {
    const float *first = nullptr, *rotations = nullptr;
    int64_t n_rot = 0;
    bool interleaved = false;
};

/// One step of flash attention: n_q queries of each of n_heads heads of v over the n <= kBlockTokens rows of
/// a block. A head of v has k_heads heads of k, each for n_q / k_heads of its queries. q
/// [head][query][k.dim]; max, sum [head][query] and values [head][query][values_stride] are updated; values
/// are only read where sum is not 0. rows: scratch of kBlockTokens * rows_stride floats. packed_q
/// [head][query]: by pack_query(), for k of Q8, or of Q4 where packs_four_bits(k.dim).
struct BlockAttention {
    BlockRows k, v;
    BlockRope rope;  // if k is by_channel
    int64_t n, n_heads, n_q, k_heads;
    const float* q;
    const void* packed_q;
    float scale, score_cap;  // see finish_scores()
    const float* bias;       // of the first head's first query and the first row, or nullptr
    size_t bias_stride;      // from head to head; the next query's bias starts one float before
    int64_t n_queries;       // of one query head; n_q is a multiple
    float *max, *sum, *values;
    size_t values_stride;
    float* rows;
    size_t rows_stride;
    Access access;
    float* keys = nullptr;  // weighted sums of the rows of k, k_heads side by side; or nullptr
    size_t keys_stride = 0;
    bool accumulate = false;  // add scores to the output
};

/// A query for score_rotated(): times the static scales of the channels, and normalised so that any rotation
/// of it is at most 2^15 - 2. Two arrays of rotated_dim(dim) floats follow: q, and q rotated by 90 degrees.
struct RotatedQuery {
    float unit, unused[15];
};
inline constexpr int64_t rotated_dim(int64_t dim) { return (dim + 31) / 32 * 32; }
inline constexpr int64_t rotated_query_floats(int64_t dim) {
    return static_cast<int64_t>(sizeof(RotatedQuery) / sizeof(float)) + 2 * rotated_dim(dim);
}

// Absorbed rows: values that every query head reads whole (modes k, k+r, x, xr, e), several blocks at a time,
// by integer products where these are fast. A pair is a (head, query).

/// The most rows at a time, see AttentionPlan::absorbed_rows.
inline constexpr int64_t kAbsorbedBlocks = 8, kAbsorbedRows = kAbsorbedBlocks * kBlockTokens;
/// Columns of a q4 group; the most groups whose offsets are computed at once.
inline constexpr int64_t kQ4Columns = 32, kMaxOffsets = 16;

/// A softmax weight so large that quantising the others beside it would lose them: it is multiplied in
/// float32.
struct Outlier {
    int32_t pair, row;
    float weight;
};
inline constexpr int64_t kMaxOutliers = 16;  // of one pair in one call
/// Statistics of the weights of a pair so far: the sum of squares without the largest outlier, the square of
/// that, and (for rows of codes) the number of weights that are not 0.
struct WeightStats {
    float squares, largest, rows;
};

/// int32 sums of the tiles of 32 pairs and 64 columns.
inline constexpr int64_t kTiledSums = 32 * 64;
/// Floats of scratch that absorb_values() needs for the weights of so many pairs.
inline constexpr int64_t weight_floats(int64_t pairs) {
    constexpr int64_t listed = 2 * kMaxOutliers * (1 + int64_t(sizeof(Outlier) / sizeof(float)));
    constexpr int64_t each = kAbsorbedRows + kAbsorbedRows / 2 + kBlockTokens + 3 + kMaxOffsets + listed;
    return (pairs + 15) / 16 * 16 * each + (pairs + 31) / 32 * kTiledSums;
}

/// Operands of four products of tiles, two of a with two of b, of rows of 64 * steps bytes of a; distances in
/// bytes. a: 16 rows of uint8 or bf16, a_stride apart, the second tile a_next further; 0: there is none, nor
/// are its sums. b: 16 columns of int8 or bf16, the rows of a column that share 4 bytes of a adjacent, these
/// b_stride apart, the second tile b_next further.
struct TileOperands {
    const void* a;
    int64_t a_stride, a_next;
    const void* b;
    int64_t b_stride, b_next;
    int64_t steps;
};
/// 32 columns of rows in q8 and the weights of pairs that meet them. Sums of 32 pairs are kTiledSums apart.
struct TiledCodes {
    const void* weights;
    int64_t weights_stride, n_pairs;
    const void* const* blocks;  // two for each step; nullptr: the weights of its rows are 0
    int64_t offset, stride;     // of the columns in a block, of rows
    int64_t steps;              // of kTiledStep rows; at most kAbsorbedRows
};
inline constexpr int64_t kTiledStep = 64;
/// Rows of floats and packed x that meet them; strides in floats.
struct TiledRows {
    const float* x;
    int64_t x_stride, n_x;
    const float* rows;
    int64_t stride, n, dim;
};
inline constexpr int64_t kMaxPacked = 512, kPackedMultiple = 32;
/// A group of columns of the rows of a block in q4. stride: bytes from row to row; scales: one for each row.
struct Q4Group {
    const void* codes;
    int64_t stride;
    const float* scales;
};
inline constexpr int64_t kTiledGroup = kBlockTokens * kQ4Columns * 2;  // bytes
/// Products by tiles.
struct TileKernels {
    // Sums [tile of a][tile of b][row of a][column of b]. begin() comes before them and end() after them, on
    // the same thread.

    void (*begin)();
    void (*multiply_rows)(const TiledCodes& operands, int32_t* sums);
    void (*multiply)(const TileOperands& operands, float* sums);  // of bf16
    void (*end)();

    /// Scale * (code - 8) in bf16: kTiledGroup bytes, a step of two tiles of b, which lie row beside row.
    void (*fill_q4)(const Q4Group& group, void* to);

    // Attention of many queries, every number split into two bf16.

    /// Packs n <= kMaxPacked floats times a factor, in place: they take the next kPackedMultiple. First come
    /// all as bf16, then all rounding errors.
    void (*pack)(float* x, int64_t n, float factor);
    /// out[t * ld + i] = x[t] . rows[i]
    void (*scores)(const TiledRows& x, float* out, size_t ld);
    /// out[t] = factor[t] * out[t] + sum of x[t][i] * rows[i]; dim is a multiple of 16. Where factor is 0,
    /// out may be uninitialised.
    void (*values)(const TiledRows& x, const float* factor, float* out, size_t out_stride);
};

/// out[pairs[pair]] = factor[pair] * itself + sum of p[pair][i] * row i over the rows [first, first + n) +
/// the outliers. A row is `heads` stored heads of `dim` columns. Where factor is 0, out may be uninitialised;
/// it has room for 16 columns past the last whole 16. weights: scratch of weight_floats(n_pairs). exact: sum
/// in floats.
struct AbsorbedValues {
    uint32_t type;  // DType, any that a cache row may have
    bool exact;
    const void* blocks[kAbsorbedBlocks];  // the first stored head of each; nullptr: not used
    const void* next[kAbsorbedBlocks];
    size_t head_stride;
    int64_t heads, dim, first, n, n_pairs;
    int64_t rows;          // >= first + n, a multiple of all vector sizes
    const int32_t* pairs;  // index of the output of each pair
    const float* p;        // [pair][kAbsorbedRows], `rows` of them used: 0 where there is no row
    const float* factor;
    const Outlier* outliers;  // sorted by pair
    int64_t n_outliers;
    float* weights;
    float* out;
    size_t out_stride;
    const TileKernels* tiles;  // or nullptr
};

/// The layout of relative rotations: tiles of kRotationRows rows and kRotationColumns columns, and in each
/// row of a tile cosines, then sines. For rows of Q8 they are int16 in Q15 (times 2^15 - 1), else floats.
/// Returns the floats that those of a block take.
inline int64_t row_rotation_floats(bool integers, int64_t dim) {
    return kBlockTokens * rotated_dim(dim) * (integers ? 1 : 2);
}
inline constexpr int64_t kRotationRows = 16, kRotationColumns = 32;
template <class Short>  // always inlined, even with -Os: else the linker would keep one copy for all ISAs
[[gnu::always_inline]] inline Short* rotation_at(Short* rotations, int64_t dim, int64_t row, int64_t column) {
    return rotations + row / kRotationRows * kRotationRows * 2 * dim +
           column / kRotationColumns * kRotationRows * 2 * kRotationColumns +
           row % kRotationRows * 2 * kRotationColumns + column % kRotationColumns;
}

/// Scores of rows of a block with RoPE (or without), for n_heads heads of n_q queries each: out[pair * ld +
/// i] (+)= unit of the query * q . RoPE(row i). The query is rotated instead of the rows: by the position of
/// the first row of the block, then by the rotation of row i relative to that; for Q8 in int16.
struct RotatedScores {
    uint32_t type;              // DType, any that a cache row may have
    const void *data, *scales;  // of the first head
    size_t head_stride;         // bytes from head to head; 0: heads are columns of one stored head
    size_t stride;              // from row to row
    int64_t n, n_heads, n_q, dim, stored_dim;
    const RotatedQuery* q;    // of the first pair; rotated_query_floats(dim) apart
    const float* first;       // cosines, then sines of the first row, rotated_dim(dim) each
    const void* rotations;    // of kBlockTokens rows relative to the first, see rotation_at()
    const void* next;         // whole rows: the kBlockTokens rows to prefetch, or nullptr
    const float* factors;     // a factor for each row, or nullptr
    int64_t factors_of_head;  // from head to head; 0: one for all
    bool accumulate;
    float* out;
    size_t ld;
};

/// Floats from the weights of one pair to those of the next: not a multiple of a page, whose rows would
/// compete for the same cache sets.
inline constexpr int64_t kStretchStride = kStretchRows + 16;

/// What skip_weights() skipped: the sum of the weights, and what it counts against the budget.
struct SkippedWeights {
    float mass, used;
};

/// A list of rows of a plane for one pair, in any order: byte offsets of elements and scales from the first
/// stored head of the first row, and their weights.
struct ListedRows {
    const int64_t *data, *scales;
    const float* p;
    int64_t n;
    float* out;
};

/// out += sum of p[i] * row i, for each list, of whole rows of `heads` stored heads of `dim` columns. rows:
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

/// values[query] += sum over n <= kBlockTokens rows of one head of p[query * ld + index[i]] * row i, whose
/// elements are at data[i] and whose scales are at scales[i]. rows: scratch as above.
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
    const LinearKernel* linear;  // ends with an entry whose product is nullptr
    /// For benchmarks, the peak rate of the arithmetic of products with this type of weight: `rounds` rounds
    /// of dot products of registers. Returns the number of multiply-adds; a vector is written to `out`, so
    /// that they are not optimised away.
    int64_t (*busy)(uint32_t type, int64_t rounds, float* out);

    /// For benchmarks, how fast memory is read: the largest of n numbers (without the last < 64 of them),
    /// read by whole vectors, since every part of a cache line would be a load of its own.
    float (*read)(const float* from, int64_t n, Access access);

    /// Dequantises n elements (a multiple of the block) of any readable DType to f32.
    void (*unpack)(uint32_t type, const void* from, int64_t n, float* to);
    /// f32 to F32, F16 or BF16, rounding to nearest even.
    void (*narrow)(uint32_t type, const float* from, int64_t n, void* to);

    float (*inverse_rms)(const float* x, float eps, int64_t n);
    void (*rms_norm)(const float* x, const float* weight, float eps, int64_t n, float* out);
    void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int64_t n,
                       float* out);
    /// Applies RoPE to one head in place; cs: (cos, sin) pairs of its position.
    void (*rope)(float* x, const float* cs, int64_t n_rot, bool interleaved);
    void (*activate)(uint32_t kind, float* x, int64_t n);  // kind: Activation
    void (*gate)(uint32_t kind, float* gate, const float* up, int64_t n);
    void (*add)(float* x, const float* y, int64_t n);
    void (*multiply)(float* x, const float* y, float factor, int64_t n);  // x *= factor * y

    /// Quantises one head of a row to a type of cache rows.
    void (*store_head)(uint32_t type, const float* from, int64_t dim, void* to, void* scales);
    /// Dequantises columns [first, first + n) of one head of n_rows rows, from_stride bytes apart, to rows
    /// to_stride floats apart.
    void (*load_head)(uint32_t type, const void* from, size_t from_stride, const void* scales, int64_t n_rows,
                      int64_t dim, int64_t first, int64_t n, float* to, size_t to_stride);

    // The same for at most kBlockTokens rows with one scale for each channel.

    /// From rows from_stride floats apart, to consecutive rows.
    void (*store_channels)(uint32_t type, const float* from, size_t from_stride, int64_t n_rows, int64_t dim,
                           void* to, void* scales);
    void (*load_channels)(uint32_t type, const void* from, size_t from_stride, const void* scales,
                          int64_t n_rows, int64_t dim, int64_t first, int64_t n, float* to, size_t to_stride);

    /// Writes packed_query_bytes(dim).
    void (*pack_query)(const float* q, int64_t dim, void* to);
    void (*attend_block)(const BlockAttention& block);

    // attend_block() in steps, so that values of rows with little weight need not be read.

    /// s[(head * n_q + query) * ld + i] = scale * q . k[i], with soft cap and bias
    void (*score_block)(const BlockAttention& block, float* s, size_t ld);
    /// Sets keep[i] of rows so that the weights p of the others add up to at most `share` of all n. Marks
    /// that are set stay.
    void (*keep_rows)(const float* p, int64_t n, float share, uint8_t* keep);
    void (*add_kept_values)(const KeptRows& kept);

    // Absorbed rows, with a budget.

    /// Sets the smallest weights to 0, which add up (if squared: whose squares add up) to at most `budget`.
    SkippedWeights (*skip_weights)(float* p, int64_t n, float budget, bool squared);
    void (*add_listed_values)(const ListedValues& values);

    // Absorbed rows, all of them.

    void (*score_rotated)(const RotatedScores& scores);
    /// Moves outliers from the next n weights of a pair to `to`, and returns how many. stats: of the pair's
    /// weights so far, zeros at first, which the running maximum has rescaled by `factor`. codes: whether
    /// rows are codes, whose weights may be quantised to 8 bits.
    int64_t (*extract_outliers)(float* p, int64_t n, bool codes, int32_t pair, float factor,
                                WeightStats* stats, Outlier* to);
    void (*absorb_values)(const AbsorbedValues& values);

    // One tile of attention: `n` rows of F32, F16 or BF16, `stride` bytes apart.

    /// out[m * ld + i] (+)= scale * q[m] . rows[i]; q[m] at q + m * q_stride, dim elements.
    void (*scores)(const float* q, size_t q_stride, int64_t n_q, uint32_t type, const void* rows,
                   size_t stride, int64_t n, int64_t dim, float scale, bool accumulate, float* out,
                   size_t ld);
    /// Soft cap (0: none), then bias (or nullptr), of the scores of one query; see AttentionArgs.
    void (*finish_scores)(float* s, int64_t n, float cap, const float* bias);
    /// Online softmax of the scores of one query: given the running maximum and sum, replaces s by exp(s -
    /// max'), updates both, and returns exp(max - max'), the factor for what was accumulated before: 0 at
    /// first, when max is -inf.
    float (*softmax)(float* s, int64_t n, float* max, float* sum);
    /// out[m] = factor[m] * out[m] + sum_i p[m * ld + i] * rows[i], dim elements. Where factor[m] is 0,
    /// out[m] may be uninitialised.
    void (*values)(const float* p, size_t ld, int64_t n_q, const float* factor, uint32_t type,
                   const void* rows, size_t stride, int64_t n, int64_t dim, float* out, size_t out_stride);

    const TileKernels* tiles = nullptr;  // of CPUs that have them
};

/// Whether there is a kernel for weights of this type.
bool multiplies(const Isa& isa, DType type);

/// The tables of this build that this CPU can run, best first; never empty.
const Isa* const* supported_isas(int* n);

/// Default prefetching, as measured: of products of one token with codes of few bits, whose arithmetic takes
/// as long as memory, and of cached rows. For rows some CPUs want prefetches into L1 alone: on Zen 5 a line
/// that comes from memory and again from L2 takes two of the few line fill buffers. Intel cores then fetch a
/// third as fast (Cascade Lake: 6 instead of 16 GB/s).
Access usual_access_of_codes();
Access usual_access_of_rows();

}  // namespace slimrt::cpu
