// Quantises f32 weights to Q2_K, Q3_K, Q4_K, Q5_K, Q6_K and Q4_0. For converting models.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/thread_pool.h"

namespace slimrt::cpu {

/// The range of the importance of a column, whose mean is about 1: sums of squares stay finite.
inline constexpr float kLeastImportance = 0x1p-20f, kMostImportance = 0x1p20f;

/// Writes x [rows, cols], cols a multiple of the type's block, as blocks of `type`, one after the other.
/// importance: of each column, what an element's squared error counts, within the range above; null: 1. The
/// bytes depend on these numbers alone: not on the machine's instruction set, nor on the number of threads.
///
/// Throws Error: argument (another type, other cols), unsupported (a value that is not finite, or is beyond
/// what the type's f16 scales reach).
void quantize(DType type, const float* x, int64_t rows, int64_t cols, const float* importance, void* out,
              ThreadPool& pool);

}  // namespace slimrt::cpu
