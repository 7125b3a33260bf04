// Norms of rows: a block has one row, which it reads again from L1. Sums have one order in all kernels.
#pragma once

#include "kernels/cuda/kernels.h"
#include "kernels/cuda/packs.cuh"

namespace slimrt::cuda {

struct NormView {
    NormKind kind{};
    const float *weight = nullptr, *bias = nullptr;
    float eps = 0;
    Matrix out;

    NormView() = default;
    explicit NormView(const Norm& norm)
        : kind(norm.kind),
          weight(Matrix(norm.weight).data),
          bias(Matrix(norm.bias).data),
          eps(norm.eps),
          out(norm.out) {}
};

inline bool packs_norm(const Tensor& x, const Norm& norm) {
    const auto fits = [](const Tensor& t) { return !t || packs_fit(t); };
    return packs_fit(x) && packs_fit(norm.out) && fits(norm.weight) && fits(norm.bias);
}

/// Threads of a block; more of them would add nothing, so that sums are the same.
inline unsigned norm_threads(int64_t cols, bool packed) {
    return threads_for(packed ? cols / kPack : cols, kThreads);
}

/// Sum of fn over the elements of a row.
template <int n, class Fn>
__device__ float total(const float* row, int64_t cols, float* shared, Fn fn) {
    float sum = 0;
    for (int64_t i = threadIdx.x * n; i < cols; i += blockDim.x * n) {
        const auto v = load_pack<n>(row + i);
        for (const float value : v.at) sum += fn(value);
    }
    return join_block(sum, 0.0f, shared, [](float a, float b) { return a + b; });
}

/// A row's statistics: its values become (value - mean) * scale, before weight and bias.
struct RowScale {
    float mean, scale;
};

template <int n>
__device__ RowScale row_scale(const NormView& norm, const float* row, int64_t cols) {
    __shared__ float shared[kWarp];
    const float count = static_cast<float>(cols);
    float mean = 0;
    if (norm.kind == NormKind::layer)
        mean = total<n>(row, cols, shared, [](float value) { return value; }) / count;
    const float squares =
        total<n>(row, cols, shared, [mean](float value) { return (value - mean) * (value - mean); });
    return {mean, 1 / sqrtf(squares / count + norm.eps)};
}

/// Elements i ... of a row, normed; rounded as if each operation were a kernel of its own.
template <int n>
__device__ inline Pack<float, n> normed(const NormView& norm, const RowScale& by, Pack<float, n> v,
                                        int64_t i) {
    for (float& value : v.at) value = __fmul_rn(__fsub_rn(value, by.mean), by.scale);
    if (norm.weight) {
        const auto times = load_pack<n>(norm.weight + i);
        for (int j = 0; j < n; ++j) v.at[j] = __fmul_rn(v.at[j], times.at[j]);
    }
    if (norm.bias) {
        const auto more = load_pack<n>(norm.bias + i);
        for (int j = 0; j < n; ++j) v.at[j] = __fadd_rn(v.at[j], more.at[j]);
    }
    return v;
}

template <int n>
__device__ void norm_row(const NormView& norm, const Matrix& x, int64_t cols, int64_t at) {
    const float* const row = x.row(at);
    const RowScale by = row_scale<n>(norm, row, cols);
    for (int64_t i = threadIdx.x * n; i < cols; i += blockDim.x * n)
        store_pack(norm.out.row(at) + i, normed<n>(norm, by, load_pack<n>(row + i), i));
}

}  // namespace slimrt::cuda
