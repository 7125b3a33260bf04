// Weights in which 16 rows lie side by side, as the same bits: a vector then holds a word of each row, so
// that products of one token need no more instructions than those of many. Of 16 blocks of 4 w bytes, or one
// or two more: the first four bytes of every row, the next four, ..., then what is left of every row (d).
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace slimrt::cpu {

inline constexpr int64_t kInterleavedRows = 16;

/// The type that holds what `type` holds, in as many bytes; `type` itself if there is none.
DType interleaved_type(DType type);
/// The type of which these rows are; the type itself if they are not interleaved.
DType rows_type(DType type);

/// 16 rows of n elements, `stride` bytes apart, to interleaved_type(type), which is another.
void interleave(DType type, const void* rows, size_t stride, int64_t n, void* to);

/// Row number `row` of 16, of n elements, as rows_type(type).
void take_row(DType type, const void* rows, int64_t row, int64_t n, void* to);

}  // namespace slimrt::cpu
