// Rounds rows of x to 16 bits, for products of many tokens.
#include "kernels/cuda/linear_job.cuh"

namespace slimrt::cuda {

namespace {

constexpr int kThreads = 256;

/// A block a row of x.
__global__ void round_kernel(Job job, bool bf16, uint16_t* to, float* inverse, int stride, int* too_large) {
    constexpr int kUsual = 14;  // larger exponents are scaled to this one
    constexpr int kSmall = -8, kTop = 126;
    __shared__ uint32_t largest_of[kWarp];
    const int token = blockIdx.x / job.all_heads(), columns = blockIdx.x % job.all_heads();
    const float* const from = x_row(job, columns / job.group, columns % job.group, token);
    uint32_t largest = 0;
    for (int i = threadIdx.x; i < job.k; i += blockDim.x)
        largest = max(largest, __float_as_uint(from[i]) & 0x7fffffff);
    largest = largest_in_warp(largest);
    if (threadIdx.x % kWarp == 0) largest_of[threadIdx.x / kWarp] = largest;
    __syncthreads();
    for (unsigned w = 0; w < blockDim.x / kWarp; ++w) largest = max(largest, largest_of[w]);
    const int exponent = exponent_of(largest);
    const bool usual = largest == 0 || (exponent >= kSmall && exponent <= kUsual);
    const int shift = usual ? 0 : min(kUsual - exponent, kTop);
    const float factor = power_of_2(shift);
    for (int i = threadIdx.x; i < stride; i += blockDim.x) {
        const float value = i < job.k ? from[i] * factor : 0.0f;
        to[size_t(blockIdx.x) * stride + i] = bf16 ? to_bf16(value) : to_f16(value);
    }
    if (threadIdx.x == 0) inverse[blockIdx.x] = power_of_2(-shift);
    if (threadIdx.x + blockIdx.x == 0 && too_large) *too_large = 0;
}

}  // namespace

void round_rows(const Device& device, const Job& job, bool bf16, const Rounded& to) {
    const Shape shape{.grid = dim3(job.tokens * job.all_heads()), .block = dim3(kThreads)};
    launch(device, round_kernel, shape, job, bf16, const_cast<uint16_t*>(to.x),
           const_cast<float*>(to.inverse), to.stride, to.too_large);
}

}  // namespace slimrt::cuda
