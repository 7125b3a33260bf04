// From products to scores before the softmax, the same in every attention kernel.
#pragma once

#include <cuda_runtime.h>

#include "kernels/backend.h"

namespace slimrt::cuda {

/// Scores may be in units of ln 2, for softmax by powers of two; `unit` converts natural logits to them.
struct ScoreFinish {
    float unit = 1;
    float cap = 0, inverse_cap = 0;        // in these units; 0: none
    const float* relative_bias = nullptr;  // [head][origin + distance], or none
    int64_t bias_stride = 0, bias_origin = 0;
    const float* sinks = nullptr;  // [head], or none

    ScoreFinish() = default;
    ScoreFinish(const AttentionArgs& args, float unit)
        : unit(unit),
          cap(args.score_cap * unit),
          inverse_cap(cap > 0 ? 1 / cap : 0),
          relative_bias(args.relative_bias ? args.relative_bias.f32() : nullptr),
          bias_stride(int64_t(args.relative_bias.stride / sizeof(float))),
          bias_origin(args.relative_origin),
          sinks(args.sinks ? args.sinks.f32() : nullptr) {}

    /// A head's attention sink, which only the softmax's denominator counts.
    __device__ float sink(int head) const { return sinks ? sinks[head] * unit : -__builtin_inff(); }
};

/// The score of a query and a row `distance` positions after it, from their product: scaled, capped, with the
/// relative bias; -infinity where the row is masked.
__device__ inline float finish_score(const ScoreFinish& how, float product, float scale, bool sees, int head,
                                     int64_t distance) {
    float score = product * scale;
    if (how.cap > 0) score = how.cap * tanhf(score * how.inverse_cap);
    if (how.relative_bias && sees)
        score += how.relative_bias[head * how.bias_stride + how.bias_origin + distance] * how.unit;
    return sees ? score : -__builtin_inff();
}

}  // namespace slimrt::cuda
