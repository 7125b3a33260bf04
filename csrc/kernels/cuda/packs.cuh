// What kernels over rows share: packs of a few elements, sums of a block, loops over all elements.
#pragma once

#include <cstdint>

#include "core/tensor.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/ptx.cuh"

namespace slimrt::cuda {

constexpr int kPack = 4;

inline bool divides(size_t unit, const void* p) { return reinterpret_cast<uintptr_t>(p) % unit == 0; }
/// Whether rows may be moved in packs of kPack elements of `size` bytes.
inline bool packs_fit(const void* data, size_t stride, int64_t cols, size_t size = sizeof(float)) {
    return cols % kPack == 0 && divides(kPack * size, data) && stride % (kPack * size) == 0;
}
inline bool packs_fit(const Tensor& t) { return packs_fit(t.data, t.stride, t.cols); }

/// A tensor of f32 as kernels see it.
struct Matrix {
    float* data = nullptr;
    size_t stride = 0;  // elements

    Matrix() = default;
    explicit Matrix(const Tensor& t) : data(t ? t.f32() : nullptr), stride(t.stride / sizeof(float)) {}
    __device__ float* row(int64_t i) const { return data + i * stride; }
};

constexpr unsigned kAll = ~0u;  // lanes

/// Joins the values of all threads of a block in a fixed order, join(join(a, b), c) ...; all threads call it
/// and get the result. shared: 32 elements; none: the neutral element of join.
template <class T, class Join>
__device__ inline T join_block(T value, T none, T* shared, Join join) {
    for (int bits = kWarp / 2; bits > 0; bits /= 2) value = join(value, __shfl_xor_sync(kAll, value, bits));
    const int warps = blockDim.x / kWarp, lane = threadIdx.x % kWarp;
    if (warps == 1) return value;
    __syncthreads();  // others may still read what was here before
    if (lane == 0) shared[threadIdx.x / kWarp] = value;
    __syncthreads();
    value = lane < warps ? shared[lane] : none;
    for (int bits = kWarp / 2; bits > 0; bits /= 2) value = join(value, __shfl_xor_sync(kAll, value, bits));
    return value;
}

/// Threads of a block for so many items: whole warps, at most `most`.
inline unsigned threads_for(int64_t items, unsigned most) {
    const int64_t whole = (items + kWarp - 1) / kWarp * kWarp;
    return static_cast<unsigned>(whole < most ? whole : most);
}

constexpr unsigned kThreads = 256, kMaxGridY = 65535;

/// op.run<n>(row, column) for every n columns; blocks (x, y) stride over columns and rows.
template <int n, class Op>
__global__ void each_pack(Op op, int64_t rows, int64_t cols) {
    begin_early();
    for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
        for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i * n < cols; i += gridDim.x * blockDim.x)
            op.template run<n>(row, i * n);
    }
}

template <int pack = kPack, class Op>
void each(const Device& device, int64_t rows, int64_t cols, bool packed, const Op& op) {
    if (rows == 0 || cols == 0) return;
    const int64_t packs = packed ? cols / pack : cols;
    const unsigned threads = threads_for(packs, kThreads);
    Shape shape;
    shape.block = dim3(threads);
    shape.grid = dim3(static_cast<unsigned>((packs + threads - 1) / threads),
                      static_cast<unsigned>(rows < kMaxGridY ? rows : kMaxGridY));
    shape.early = true;
    launch(device, packed ? &each_pack<pack, Op> : &each_pack<1, Op>, shape, op, rows, cols);
}

}  // namespace slimrt::cuda
