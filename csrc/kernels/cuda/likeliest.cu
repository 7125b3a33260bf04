// The likeliest token of a row, or the likeliest ones, found on the device: logits need not go to the host.
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/packs.cuh"

namespace slimrt::cuda {
namespace {

constexpr unsigned kRowThreads = 1024;
constexpr int kDigit = 11;  // bits of a key that a pass over the row settles
constexpr unsigned kBins = 1u << kDigit;
static_assert(kBins == 2 * kRowThreads, "a thread has two bins");
constexpr int kGroup = kRowThreads / Backend::kMaxLargest;
static_assert(kGroup <= kWarp && (kGroup & (kGroup - 1)) == 0, "groups are parts of warps");

using Key = unsigned long long;

/// Ordered as numbers are, of equal ones the lower column first; NaN is the largest.
__device__ Key key_of(float x, int64_t column) {
    if (x != x) return ~Key{0};
    const uint32_t bits = __float_as_uint(x + 0.0f);  // -0 becomes 0
    return Key{bits >> 31 ? ~bits : bits | 1u << 31} << 32 | ~static_cast<uint32_t>(column);
}

/// f(number, column) for all of a row, each in one thread of the block, n at a time.
template <int n, class F>
__device__ void each_of(const float* row, int64_t cols, F f) {
#pragma unroll 4
    for (int64_t i = threadIdx.x * n; i < cols; i += blockDim.x * n) {
        const auto some = load_pack<n>(row + i);
#pragma unroll
        for (int j = 0; j < n; ++j) f(some.at[j], i + j);
    }
}

__device__ Key larger(Key a, Key b) { return a > b ? a : b; }

/// The largest key that a thread of the block meets.
template <int n>
__device__ Key most_of(const float* row, int64_t cols) {
    Key most = 0;
    each_of<n>(row, cols, [&](float x, int64_t column) { most = larger(most, key_of(x, column)); });
    return most;
}

/// A block a row.
template <int n>
__global__ void __launch_bounds__(kRowThreads) likeliest_kernel(Matrix x, int32_t* out, int64_t cols) {
    begin_early();
    __shared__ Key shared[kWarp];
    const Key most = join_block(most_of<n>(x.row(blockIdx.x), cols), Key{0}, shared, larger);
    if (threadIdx.x != 0) return;
    const bool found =
        most < key_of(__uint_as_float(0x7f800000u), cols) && most > key_of(__uint_as_float(0xff800000u), 0);
    out[blockIdx.x] = found ? static_cast<int32_t>(~static_cast<uint32_t>(most)) : -1;
}

/// Where the wanted-th of all counted keys is, from the largest on.
struct Place {
    unsigned bin, before, in_bin;  // before: keys in larger bins
};

/// All threads of the block, kRowThreads, call it and get the result.
__device__ Place place_of(unsigned wanted, const unsigned* bins) {
    __shared__ unsigned sums[kWarp];
    __shared__ Place found;
    const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const unsigned bin = kBins - 1 - 2 * threadIdx.x, both = bins[bin] + bins[bin - 1];
    unsigned sum = both;  // of this and all larger bins
    for (unsigned by = 1; by < kWarp; by *= 2) {
        const unsigned of_others = __shfl_up_sync(kAll, sum, by);
        if (lane >= by) sum += of_others;
    }
    if (lane == kWarp - 1) sums[warp] = sum;
    __syncthreads();
    for (unsigned i = 0; i < warp; ++i) sum += sums[i];
    const unsigned before = sum - both;
    if (before < wanted && wanted <= sum)
        found = wanted <= before + bins[bin] ? Place{bin, before, bins[bin]}
                                             : Place{bin - 1, before + bins[bin], bins[bin - 1]};
    __syncthreads();
    return found;
}

/// A key that at least kMaxLargest keys reach, if the row has so many: the least of those that groups of
/// threads met as their largest. Few reach it, so that few are counted one by one.
template <int n>
__device__ Key bound_of(const float* row, int64_t cols) {
    __shared__ Key shared[kWarp];
    Key most = most_of<n>(row, cols);
    for (int bits = 1; bits < kGroup; bits *= 2) most = larger(most, __shfl_xor_sync(kAll, most, bits));
    return join_block(most, ~Key{0}, shared, [](Key a, Key b) { return a < b ? a : b; });
}

/// The count-th largest key of the row, or one between it and the next: a radix selection.
template <int n>
__device__ Key least_of_largest(const float* row, int64_t cols, unsigned count) {
    __shared__ unsigned bins[kBins];
    const Key bound = bound_of<n>(row, cols);
    Key least = 0, known = 0;  // of the key, and which of its bits
    for (int shift = 64 - kDigit;; shift = shift > kDigit ? shift - kDigit : 0) {
        for (unsigned i = threadIdx.x; i < kBins; i += kRowThreads) bins[i] = 0;
        __syncthreads();
        each_of<n>(row, cols, [&](float x, int64_t column) {
            const Key key = key_of(x, column);
            if (key >= bound && (key & known) == least) atomicAdd(&bins[key >> shift & (kBins - 1)], 1u);
        });
        __syncthreads();
        const Place at = place_of(count, bins);
        least |= Key{at.bin} << shift;
        known |= Key{kBins - 1} << shift;
        count -= at.before;
        if (count == at.in_bin || shift == 0) return least;
    }
}

/// A block a row. Keys differ but for those of NaN: then any of these are taken.
template <int n>
__global__ void __launch_bounds__(kRowThreads)
    largest_kernel(Matrix x, Matrix out, int64_t cols, unsigned count) {
    begin_early();
    __shared__ float numbers[Backend::kMaxLargest];
    __shared__ int32_t columns[Backend::kMaxLargest];
    __shared__ unsigned n_taken;
    const float* const row = x.row(blockIdx.x);
    if (threadIdx.x == 0) n_taken = 0;
    const Key least = least_of_largest<n>(row, cols, count);
    each_of<n>(row, cols, [&](float number, int64_t column) {
        if (key_of(number, column) < least) return;
        const unsigned at = atomicAdd(&n_taken, 1u);
        if (at < count) numbers[at] = number, columns[at] = static_cast<int32_t>(column);
    });
    __syncthreads();
    if (threadIdx.x >= count) return;
    const int32_t column = columns[threadIdx.x];
    unsigned rank = 0;
    for (unsigned i = 0; i < count; ++i) rank += columns[i] < column;
    out.row(blockIdx.x)[rank] = numbers[threadIdx.x];
    reinterpret_cast<int32_t*>(out.row(blockIdx.x))[count + rank] = column;
}

}  // namespace

void largest(const Device& device, Tensor x, Tensor out) {
    const unsigned count = static_cast<unsigned>(out.cols / 2);
    if (x.rows == 0 || count == 0) return;
    const Shape shape{.grid = dim3(static_cast<unsigned>(x.rows)), .block = dim3(kRowThreads), .early = true};
    launch(device, packs_fit(x) ? &largest_kernel<kPack> : &largest_kernel<1>, shape, Matrix(x), Matrix(out),
           x.cols, count);
}

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
