// What a step does to its own rows before attention, in one kernel: q and k are rotated, k and v stored. A
// block has one head of one row, which it rotates and then codes.
#include <algorithm>

#include "kernels/cuda/code_rows.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/rotate.cuh"

namespace slimrt::cuda {
namespace {

constexpr unsigned kMaxThreads = 512;

/// StepRows as the kernel sees them.
struct View {
    Matrix x, table;
    const int32_t* positions = nullptr;
    Target to;  // no slots: not stored
    int heads = 0, head_dim = 0, half = 0, begin = 0;
    bool interleaved = false, rotates_packs = false, stores_packs = false;
};
struct Views {
    View at[kMaxStepRows];
    int64_t rows = 0;
};

template <bool interleaved, int n>
__device__ void rotate_head(const View& v, int64_t row, int head) {
    const Rotate<interleaved> rotate{v.x, v.table, v.positions, v.head_dim, v.half, v.begin};
    for (int i = threadIdx.x * n; i < v.half; i += blockDim.x * n)
        rotate.template run<n>(row, static_cast<int64_t>(head) * v.half + i);
}

__device__ void rotate_head(const View& v, int64_t row, int head) {
    if (v.rotates_packs)
        v.interleaved ? rotate_head<true, kPack>(v, row, head) : rotate_head<false, kPack>(v, row, head);
    else
        v.interleaved ? rotate_head<true, 1>(v, row, head) : rotate_head<false, 1>(v, row, head);
}

__device__ void store_head(const View& v, int64_t row, int head, uint32_t* shared) {
    const FloatSource x{v.x, v.head_dim};
    with_row_type(v.to.plane.dtype, [&]<class Row>(Row) {
        if constexpr (Row::kGroup)
            code_head_in_groups<Row, true>(x, row, head, v.to);
        else if (v.stores_packs)
            code_head<Row, kPack, true>(x, row, head, v.to, shared);
        else
            code_head<Row, 1, true>(x, row, head, v.to, shared);
    });
}

/// Blocks (head of one of the views, row).
__global__ void __launch_bounds__(kMaxThreads) step_rows_kernel(const __grid_constant__ Views views) {
    begin_early();
    __shared__ uint32_t shared[kWarp];
    int head = static_cast<int>(blockIdx.x), i = 0;
    while (head >= views.at[i].heads) head -= views.at[i++].heads;
    const View& v = views.at[i];
    for (int64_t row = blockIdx.y; row < views.rows; row += gridDim.y) {
        if (v.half) rotate_head(v, row, head);
        __syncthreads();
        if (v.to.slots) store_head(v, row, head, shared);
    }
}

View view_of(const StepRows& rows) {
    const auto& [x, n_heads, rope, positions, slots] = rows;
    View v;
    v.x = Matrix(x);
    v.heads = n_heads;
    v.head_dim = static_cast<int>(x.cols / n_heads);
    if (rope) {
        v.table = Matrix(rope.table);
        v.positions = positions.i32();
        v.half = rope.n_rot / 2;
        v.begin = rope.first;
        v.interleaved = rope.interleaved;
        v.rotates_packs = packs_rotate(x, n_heads, rope);
    }
    if (!slots) return v;
    v.to = target_of(*slots);
    with_row_type(slots->dtype, [&]<class Row>(Row) {
        v.stores_packs = !Row::kGroup && packs_fit(x) && plane_fits(v.to.plane, sizeof(typename Row::Code));
    });
    return v;
}

}  // namespace

void step_rows(const Device& device, std::span<const StepRows> all) {
    Views views;
    views.rows = all[0].x.rows;
    unsigned heads = 0;
    int64_t widest = 0;
    for (size_t i = 0; i < all.size(); ++i) {
        views.at[i] = view_of(all[i]);
        heads += static_cast<unsigned>(all[i].n_heads);
        const int64_t pairs = views.at[i].half, dim = all[i].slots ? views.at[i].head_dim : 0;
        widest = std::max({widest, views.at[i].rotates_packs ? pairs / kPack : pairs,
                           views.at[i].stores_packs ? dim / kPack : dim});
    }
    const Shape shape{.grid = dim3(heads, static_cast<unsigned>(std::min<int64_t>(views.rows, kMaxGridY))),
                      .block = dim3(threads_for(widest, kMaxThreads)),
                      .early = true};
    launch(device, step_rows_kernel, shape, views);
}

}  // namespace slimrt::cuda
