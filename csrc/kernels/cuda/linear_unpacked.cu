// Unpacks quantised weights to f16 in device memory, for cuBLASLt: a warp has a chunk of k of kRows rows,
// their bytes and scales in shared memory.
#include "kernels/cuda/linear_unpack.cuh"

namespace slimrt::cuda {

namespace {

constexpr int kWarps = 8, kRows = 8;

/// Blocks: rows, chunks.
template <class W>
__global__ void __launch_bounds__(kWarps* kWarp)
    unpack_kernel(Job job, size_t row_bytes, Tile rows, int n, uint16_t* to, int stride, int* too_large) {
    constexpr int kNumbers = W::kScales * (1 + W::kMins);
    __shared__ __align__(kPiece) unsigned char staged[kWarps][kRows * kRowSpace<W>];
    __shared__ float scales[kWarps][kNumbers][kRows];
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, chunk = blockIdx.y;
    const int first = (int(blockIdx.x) * kWarps + warp) * kRows;
    const size_t offset = size_t(chunk) * W::kChunkBytes;
    const Tile own = {rows.part, rows.head, rows.row + first};
    if (first >= n) return;
    stage_rows<W>(staged[warp], job, own, kRows, offset, row_bytes, lane, kWarp);
    commit_copies();
    wait_copies<0>();
    __syncwarp();
    const auto row_at = [&](int row) { return staged_row<W>(staged[warp], job, own, row, offset); };
    if (lane < min(kRows, n - first) && scales_of_row<W>(row_at(lane), &scales[warp][0][lane], kRows, 1))
        atomicExch(too_large, 1);  // other threads may do so, too
    __syncwarp();
    const int group = lane / 4, member = lane % 4, column = chunk * W::kChunk + group * kGroup + 4 * member;
    if (column >= job.k) return;
#pragma unroll 2
    for (int row = 0; row < min(kRows, n - first); ++row) {
        uint16_t* const at = to + size_t(first + row) * stride + column;
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            const int of = W::kScales * 16 == W::kChunk ? 2 * group + s : group;
            const float minimum = W::kMins ? scales[warp][kNumbers - W::kScales + of][row] : 0.0f;
            *reinterpret_cast<uint2*>(at + 16 * s) =
                four_weights(W::codes(row_at(row), group, s, member), scales[warp][of][row], minimum);
        }
    }
}

}  // namespace

void unpack_rows(const Device& device, DType dtype, const Job& job, int part, int first, int n,
                 const Rounded& x, uint16_t* to) {
    with_weight(dtype, [&](auto w) {
        using W = decltype(w);
        if constexpr (W::kScales > 0) {
            const Shape shape{.grid = dim3(divide_up(n, kWarps * kRows), divide_up(job.k, W::kChunk)),
                              .block = dim3(kWarps * kWarp)};
            launch(device, unpack_kernel<W>, shape, job, W::row_bytes(job.k), Tile{part, 0, first}, n, to,
                   x.stride, x.too_large);
        }
    });
}

}  // namespace slimrt::cuda
