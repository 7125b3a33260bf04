// Weights whose rows are interleaved by 16, with the same bits: a vector load then has a word of each row,
// and products of one token need no more instructions than those of many. 16 blocks of 4 w bytes, or one or
// two more: the first word of every row, the second of every row, ..., then the remaining bytes of every row
// (d).
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace slimrt::cpu {

inline constexpr int64_t kInterleavedRows = 16;

/// The interleaved type of `type`, of the same size; `type` itself if it has none.
DType interleaved_type(DType type);
/// The type of single rows of an interleaved type; `type` itself if it is not interleaved.
DType rows_type(DType type);

/// Interleaves 16 rows of n elements, `stride` bytes apart, to interleaved_type(type), which must differ.
void interleave(DType type, const void* rows, size_t stride, int64_t n, void* to);

/// Extracts row `row` of 16, of n elements, as rows_type(type).
void take_row(DType type, const void* rows, int64_t row, int64_t n, void* to);

}  // namespace slimrt::cpu
