// Rotary position embedding of rows.
#pragma once

#include "kernels/backend.h"
#include "kernels/cuda/packs.cuh"

namespace slimrt::cuda {

/// "Columns" are pairs, n_rot / 2 of each head; n of them are two packs of x and two of the table's cos, sin,
/// ...
template <bool interleaved>
struct Rotate {
    Matrix x, table;
    const int32_t* positions;
    int head_dim, half, begin;  // begin: first rotated column of a head
    template <int n>
    __device__ void run(int64_t row, int64_t column) const {
        const int head = static_cast<int>(column) / half, i = static_cast<int>(column) % half;
        float* const first =
            x.row(row) + static_cast<int64_t>(head) * head_dim + begin + (interleaved ? 2 * i : i);
        float* const second = first + (interleaved ? n : half);
        const float* const rope_row = table.row(positions[row]) + 2 * i;
        Pack<float, n> v[2] = {load_pack<n>(first), load_pack<n>(second)};
        const Pack<float, n> factors[2] = {load_pack<n>(rope_row), load_pack<n>(rope_row + n)};
        for (int j = 0; j < n; ++j) {
            const int even = 2 * j, odd = 2 * j + 1;
            const float cosine = factors[even / n].at[even % n], sine = factors[odd / n].at[odd % n];
            float& a = interleaved ? v[even / n].at[even % n] : v[0].at[j];
            float& b = interleaved ? v[odd / n].at[odd % n] : v[1].at[j];
            const float rotated = a * cosine - b * sine;
            b = b * cosine + a * sine;
            a = rotated;
        }
        store_pack(first, v[0]);
        store_pack(second, v[1]);
    }
};

/// Whether pairs of heads of x can be read in packs.
inline bool packs_rotate(const Tensor& x, int n_heads, const Rope& rope) {
    return packs_fit(x) && packs_fit(rope.table) && x.cols / n_heads % kPack == 0 &&
           rope.n_rot / 2 % kPack == 0 && rope.first % kPack == 0;
}

}  // namespace slimrt::cuda
