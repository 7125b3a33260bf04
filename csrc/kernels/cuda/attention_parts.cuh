// What the attention kernels share: which rows a query sees (the mask), and how its result is written.
#pragma once

#include "kernels/cuda/attention_view.h"

namespace slimrt::cuda {

__device__ inline float infinity() { return __uint_as_float(0x7f800000u); }

/// The unit in which numbers up to |x| are stored: the largest power of two up to it; 1 for 0 and what is not
/// finite.
__device__ inline float unit_below(float x) {
    const float power = __uint_as_float(__float_as_uint(x) & 0x7f800000u);
    return power == 0 || power == infinity() ? 1.0f : power;
}
/// 1 / unit, exactly and without a division; for 2^127 it is subnormal.
__device__ inline float inverse_of_unit(float unit) {
    const uint32_t bits = 0x7f000000u - __float_as_uint(unit);
    return __uint_as_float(bits ? bits : 0x00400000u);
}

/// Positions [first, end).
struct Range {
    int64_t first, end;
    __device__ int64_t size() const { return end > first ? end - first : 0; }
};

/// The positions of `rows` that at least one of the queries at [first, last] sees.
__device__ inline Range visible_rows(const AttentionView& a, const PlacedSequence& s, Range rows,
                                     int64_t first, int64_t last) {
    if (a.window > 0) rows.first = max(rows.first, first - a.window + 1);
    rows.end = min(rows.end, s.causal ? last + 1 : s.end);
    return rows;
}
__device__ inline Range stored_rows(const AttentionView& a, const PlacedSequence& s, int64_t first,
                                    int64_t last) {
    return visible_rows(a, s, {s.begin, s.end}, first, last);
}
__device__ inline Range fresh_rows(const AttentionView& a, const PlacedSequence& s, int64_t first,
                                   int64_t last) {
    return visible_rows(a, s, {s.position, s.fresh ? s.position + s.n_queries : s.position}, first, last);
}

/// Fresh rows as dense rows of f32.
__device__ inline RowsView fresh_view(const FloatRows& fresh, int64_t first_row, int64_t first_position) {
    RowsView rows;
    rows.base = reinterpret_cast<const unsigned char*>(fresh.row(first_row));
    rows.head_dim = 1 << 30;
    rows.row_bytes = fresh.stride * sizeof(float);
    rows.first = first_position;
    return rows;
}

/// What is subtracted from scores: the maximum, but 0 where all are -inf.
__device__ inline float reference(float max) { return max == -infinity() ? 0.0f : max; }

/// out = keep * out + share * values; keep 0: out is not read.
struct MergeFactors {
    float keep, share;
};

/// How the result of a (query, head) is written, by its maximum and sum; also writes its LSE. For one of the
/// threads that share it.
__device__ inline MergeFactors finish(const AttentionView& a, int64_t row, int head, float max, float sum) {
    float* const lse = a.lse.data ? a.lse.row(row) + head : nullptr;
    const float before = a.merge ? *lse * kLog2E : -infinity(), sink = a.finish.sink(head);
    const float high = reference(fmaxf(fmaxf(before, sink), max));
    const float keep = exp2f(before - high), own = exp2f(max - high);
    const float total = keep + exp2f(sink - high) + (sum == 0 ? 0 : own * sum);
    if (lse) *lse = (high + log2f(total)) * kLn2;
    if (total == 0) return {0, 0};
    return {keep / total, sum == 0 ? 0 : own / total};
}

__device__ inline void write(float* out, MergeFactors share, float value) {
    const float own = share.share == 0 ? 0 : share.share * value;
    *out = share.keep == 0 ? own : share.keep * *out + own;
}

/// Index of a (query, head) in Parts.
__device__ inline int64_t pair_of(const AttentionView& a, int sequence, int query, int head) {
    return (int64_t(sequence) * a.most_queries + query) * a.n_heads + head;
}

}  // namespace slimrt::cuda
