// Quantises f32 weights to the types with blocks of 256: Q4_K, Q5_K, Q6_K. For converting models.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/thread_pool.h"

namespace slimrt::cpu {

/// Writes `n` elements (a multiple of 256) as blocks of `type`: n / 256 of them, one after the other. The
/// bytes depend on the values alone: not on the machine's instruction set, nor on the number of threads.
///
/// Throws Error: argument (another type, another n), unsupported (a value that is not finite, or is beyond
/// what the type's f16 scales reach).
void quantize(DType type, const float* x, int64_t n, void* out, ThreadPool& pool);

}  // namespace slimrt::cpu
