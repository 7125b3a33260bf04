// Weights of types that nothing multiplies, as the same numbers in one that is: nothing is rounded.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace slimrt::cpu {

/// The type that holds what `type` holds, in more bytes; `type` itself if there is none.
inline DType repacked_type(DType type) { return type == DType::TQ1_0 ? DType::TQ2_0 : type; }

/// n elements, in whole blocks, from `type` to repacked_type(type), which is another.
void repack(DType type, const void* from, int64_t n, void* to);

}  // namespace slimrt::cpu
