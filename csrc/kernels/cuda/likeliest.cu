// Greedy sampling of a row on the device, so that logits need not go to the host.
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/packs.cuh"

namespace slimrt::cuda {
namespace {

constexpr unsigned kRowThreads = 1024;

using Key = unsigned long long;

/// Ordered as numbers are, of equal ones the lower column first; NaN is the largest.
__device__ Key key_of(float x, int64_t column) {
    if (x != x) return ~Key{0};
    const uint32_t bits = __float_as_uint(x + 0.0f);  // -0 becomes 0
    return Key{bits >> 31 ? ~bits : bits | 1u << 31} << 32 | ~static_cast<uint32_t>(column);
}

/// A block a row.
template <int n>
__global__ void __launch_bounds__(kRowThreads) likeliest_kernel(Matrix x, int32_t* out, int64_t cols) {
    begin_early();
    __shared__ Key shared[kWarp];
    const auto larger = [](Key a, Key b) { return a > b ? a : b; };
    const float* const row = x.row(blockIdx.x);
    Key most = 0;
#pragma unroll 4
    for (int64_t i = threadIdx.x * n; i < cols; i += blockDim.x * n) {
        const auto some = load_pack<n>(row + i);
#pragma unroll
        for (int j = 0; j < n; ++j) most = larger(most, key_of(some.at[j], i + j));
    }
    most = join_block(most, Key{0}, shared, larger);
    if (threadIdx.x != 0) return;
    const bool found =
        most < key_of(__uint_as_float(0x7f800000u), cols) && most > key_of(__uint_as_float(0xff800000u), 0);
    out[blockIdx.x] = found ? static_cast<int32_t>(~static_cast<uint32_t>(most)) : -1;
}

}  // namespace

void likeliest(const Device& device, Tensor x, Tensor out) {
    if (x.rows == 0) return;
    const bool packed = packs_fit(x);
    const Shape shape{.grid = dim3(static_cast<unsigned>(x.rows)),
                      .block = dim3(threads_for(packed ? x.cols / kPack : x.cols, kRowThreads)),
                      .early = true};
    launch(device, packed ? &likeliest_kernel<kPack> : &likeliest_kernel<1>, shape, Matrix(x), out.i32(),
           x.cols);
}

}  // namespace slimrt::cuda
