// Activations as in kernels/cpu/elementwise.cpp; NaN stays NaN.
#pragma once

#include "kernels/backend.h"
#include "kernels/cuda/numbers.cuh"

namespace slimrt::cuda {

__device__ inline float sigmoid_times(float x, float argument) { return x / (1 + expf(-argument)); }

__device__ inline float activated(Activation kind, float x) {
    const float positive = x < 0 ? 0.0f : x;
    switch (kind) {
        case Activation::silu:
            return sigmoid_times(x, x);
        case Activation::gelu_tanh:
            return sigmoid_times(x, 1.5957691216f * fmaf(0.044715f * x * x, x, x));
        case Activation::gelu_erf: {
            const float size = fminf(20, fabsf(x));  // from there on erfc is 0
            return positive - 0.5f * size * erfcf(0.70710678f * size);
        }
        case Activation::relu:
            return positive;
        case Activation::tanh:
            return tanhf(x);
        case Activation::relu_squared:
            return positive * positive;
        default: {
            const float most = x > 7 ? 7.0f : x;
            return sigmoid_times(most, 1.702f * most);
        }
    }
}

__device__ inline float gated(Activation kind, float up) {
    return kind != Activation::clamped_swish ? up : (up > 7 ? 7.0f : up < -7 ? -7.0f : up) + 1;
}

}  // namespace slimrt::cuda
