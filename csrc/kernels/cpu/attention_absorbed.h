// Dot products of absorbed rows with queries rotated by RoPE. For the units compiled once per ISA.
#pragma once

#include "kernels/cpu/attention_weights.h"

namespace slimrt::cpu::SLIMRT_ISA {
namespace {

inline void store_rotated(int16_t* to, Vec a, Vec b) { store_int16(to, a, b); }
inline void store_rotated(float* to, Vec a, Vec b) {
    store(to, a);
    store(to + lanes, b);
}

/// Rotates a query to the position of the first row of a block. to: what is multiplied with the cosines of
/// the rows' rotations relative to that row, then what is multiplied with their sines, dim each.
template <class Number>
void rotate_query(const RotatedQuery* query, const float* first, int64_t dim, Number* to) {
    const float *const q = reinterpret_cast<const float*>(query + 1), *const q_perp = q + dim;
    for (int64_t c = 0; c < dim; c += 2 * lanes) {
        Vec cos_part[2], sin_part[2];
        for (int i = 0; i < 2; ++i) {
            const int64_t at = c + i * lanes;
            const Vec cosine = load(first + at), sine = load(first + dim + at);
            cos_part[i] = fma(cosine, load(q + at), sine * load(q_perp + at));
            sin_part[i] = cosine * load(q_perp + at) - sine * load(q + at);
        }
        store_rotated(to + c, cos_part[0], cos_part[1]);
        store_rotated(to + dim + c, sin_part[0], sin_part[1]);
    }
}

/// Addresses of rows at multiples of a stride from one pointer: with a pointer for each row the compiler
/// spills them.
struct RowCursor {
    int64_t one, three;

    explicit RowCursor(int64_t stride) : one(stride), three(3 * stride) { asm("" : "+r"(one), "+r"(three)); }
    /// The address of row j; `four` is that of row j / 4 * 4, and is advanced to the next four.
    const char* operator()(int j, const char*& four) const {
        if (j > 0 && j % 4 == 0) four += 4 * one;
        return four + (j % 4 == 3 ? three : j % 4 * one);
    }
};

/// Dot products of a rotated query with `lanes` rows, `stride` bytes apart; rotations: those of the first of
/// these rows on.
template <class Stored>
Vec dots_of_floats(const float* query, const Stored* rows, int64_t stride, const float* rotations,
                   int64_t dim) {
    Vec acc[lanes];
#pragma GCC unroll 16
    for (Vec& sum : acc) sum = splat(0);
    for (int64_t c = 0; c < dim; c += lanes) {
        const Vec cos_part = load(query + c), sin_part = load(query + dim + c);
        const float* const rotation = rotation_at(rotations, dim, 0, c);
        const RowCursor row(stride);
        const char* four = reinterpret_cast<const char*>(rows + c);
#pragma GCC unroll 16
        for (int j = 0; j < lanes; ++j) {
            const float* const by = rotation + j * 2 * kRotationColumns;
            const Vec q = fma(cos_part, load(by), sin_part * load(by + kRotationColumns));
            acc[j] = fma(q, load(reinterpret_cast<const Stored*>(row(j, four))), acc[j]);
        }
    }
    return sums(acc);
}

/// Int8 rows of a head. dim is padded: columns past those of the head meet zeros of the query.
struct RotatedRows {
    const char* data;
    int64_t stride;
    const int16_t* rotations;
    int64_t dim;
};

/// Prefetches what is read kAhead bytes after a vector of rows of a stored head, which are consecutive.
inline void prefetch_next_rows(const char* rows, int64_t stride) {
    constexpr int64_t kAhead = 10 << 10, kLine = 64;
    const char *at = rows + kAhead, *const end = at + lanes * stride;
#pragma GCC unroll 8
    for (; at < end; at += kLine) __builtin_prefetch(at, 0, 3);
}

/// Prefetches a head's share of the next block of whole rows, in the order of addresses, into L2: heads are
/// read one after another.
inline void prefetch_next_block(const RotatedScores& x, int64_t head) {
    constexpr int64_t kLine = 64;
    const int64_t bytes = kBlockTokens * static_cast<int64_t>(x.stride);
    const char* const from = static_cast<const char*>(x.next);
    for (int64_t at = head * bytes / x.n_heads / kLine * kLine; at < (head + 1) * bytes / x.n_heads;
         at += kLine)
        __builtin_prefetch(from + at, 0, 2);
}

/// Dot products of a rotated query with `lanes` Int8 rows from `first` on; if not `whole`, rows past the last
/// repeat it.
template <bool whole>
Vec dots_of_rows(const int16_t* query, const RotatedRows& rows, int64_t first, int64_t n) {
    constexpr int64_t kColumns = 2 * lanes;
    RowSums acc[lanes];
#pragma GCC unroll 16
    for (RowSums& sums : acc) sums = zero_sums(RowCodes{});
    const char* const data = rows.data + first * rows.stride;
    for (int64_t c = 0; c < rows.dim; c += kColumns) {
        const Int16s cos_part = load_int16(query + c), sin_part = load_int16(query + rows.dim + c);
        const int16_t* const rotation = rotation_at(rows.rotations, rows.dim, first, c);
        const RowCursor at(rows.stride);
        const char* four = data + c;
#pragma GCC unroll 16
        for (int j = 0; j < lanes; ++j) {
            const int64_t beyond = whole ? 0 : first + j < n ? 0 : first + j - (n - 1);
            const auto* const codes = reinterpret_cast<const Int8*>(at(j, four) - beyond * rows.stride);
            const int16_t* const row = rotation + j * 2 * kRotationColumns;
            const Int16s q =
                rotate_q15(cos_part, load_int16(row), sin_part, load_int16(row + kRotationColumns));
            acc[j] = add_int16_products(acc[j], codes, q);
        }
    }
    Vec floats[lanes];
#pragma GCC unroll 16
    for (int j = 0; j < lanes; ++j) floats[j] = to_floats(acc[j]);
    return sums(floats);
}

}  // namespace
}  // namespace slimrt::cpu::SLIMRT_ISA
