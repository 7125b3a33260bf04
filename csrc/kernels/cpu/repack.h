// Weights of types without a kernel, converted without rounding to a type that has one.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace slimrt::cpu {

/// The type that `type` is converted to, with more bytes; `type` itself if it stays.
inline DType repacked_type(DType type) {
    switch (type) {
        case DType::Q5_0:
            return DType::Q8_0;
        case DType::Q3_K:
            return DType::Q6_K;
        case DType::TQ1_0:
            return DType::TQ2_0;
        case DType::IQ2_XXS:
        case DType::IQ2_XS:
        case DType::IQ2_S:
            return DType::IQ2_N;
        case DType::IQ3_XXS:
            return DType::IQ3_XXS_N;
        case DType::IQ3_S:
            return DType::IQ3_S_N;
        default:
            return type;
    }
}

/// Converts n elements, in whole blocks, from `type` to repacked_type(type), which must differ.
void repack(DType type, const void* from, int64_t n, void* to);

}  // namespace slimrt::cpu
