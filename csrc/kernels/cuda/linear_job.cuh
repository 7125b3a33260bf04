// What the kernels of linear.cu share: products of one x with weights of one type, and how the weights' rows
// are divided among blocks.
#pragma once

#include <span>

#include "kernels/cuda/kernels.h"
#include "kernels/cuda/numbers.cuh"

namespace slimrt::cuda {

constexpr int kParts = 4;         // products in one launch
constexpr int kFewTokens = 8;     // up to here the weights' bytes are the limit
constexpr int kNormedTokens = 2;  // up to here each block norms x itself, sooner than another kernel would

/// One product. Each head has `rows` rows of the weight, each of its siblings as many columns of out.
struct Part {
    const unsigned char* weight = nullptr;
    size_t stride = 0;  // bytes
    const float* bias = nullptr;
    unsigned char* out = nullptr;
    size_t out_stride = 0;  // bytes
    int rows = 0;
    int step = 0;                    // rows of the weight from one expert to the next
    const float* inverse = nullptr;  // of split weights: the power of two for each row's results
};

/// Pairs [first, end) in sorted order, all of one expert.
struct Places {
    int first, end;
};

/// Kernels take it by value. x is [tokens, heads * group * k] f32: the `group` siblings of a head multiply
/// with its rows of the weight, in blocks of their own, so that no kernel has to find out whose rows it
/// copies. With experts "heads" are pairs of a token and one of its experts, each with that expert's weight,
/// and `share` neighbouring ones have the same columns of x. With an order `tokens` are pairs, and `places`
/// their tiles.
struct Job {
    const unsigned char* x = nullptr;
    size_t x_stride = 0;  // bytes
    int tokens = 0, k = 0, heads = 1, group = 1, n_parts = 0;
    Part parts[kParts];
    const int32_t* experts = nullptr;  // of each head
    int share = 1;
    const int32_t* order = nullptr;  // pairs, expert by expert
    const Places* places = nullptr;  // by tile, as many as there might be; the last ones are empty
    bool split = false;              // x and weights are two f16 parts (split_rows()), which k counts

    __host__ __device__ int all_heads() const { return heads * group; }
};

/// Rows [row, row + as many as a tile has) of a head of a part; row counts within the head.
struct Tile {
    int part, head, row;
};

__host__ __device__ constexpr int divide_up(int a, int b) { return (a + b - 1) / b; }

/// Tiles of this many rows in all parts.
inline int tiles_of(const Job& job, int rows) {
    int tiles = 0;
    for (int p = 0; p < job.n_parts; ++p) tiles += job.heads * divide_up(job.parts[p].rows, rows);
    return tiles;
}

__device__ inline Tile tile_at(const Job& job, int index, int rows) {
    int p = 0, in_head = divide_up(job.parts[0].rows, rows);
    while (index >= job.heads * in_head) {
        index -= job.heads * in_head;
        in_head = divide_up(job.parts[++p].rows, rows);
    }
    return {p, index / in_head, index % in_head * rows};
}

/// The network that a tile's head multiplies with: its expert, if there are experts.
__device__ inline int network_of(const Job& job, const Tile& tile) {
    return job.experts ? job.experts[tile.head] : tile.head;
}
/// Row `row` of the tile's head in the weight; the head's columns of x and out.
__device__ inline const unsigned char* weight_row(const Job& job, const Tile& tile, int row) {
    const Part& part = job.parts[tile.part];
    const int step = job.experts ? part.step : part.rows;
    return part.weight + (size_t(network_of(job, tile)) * step + row) * part.stride;
}
/// Which columns of x and out a sibling of a head has.
__device__ inline int columns_at(const Job& job, int head, int sibling) { return head * job.group + sibling; }
__device__ inline const float* x_row(const Job& job, int head, int sibling, int token) {
    return reinterpret_cast<const float*>(job.x + token * job.x_stride) +
           size_t(columns_at(job, head / job.share, sibling)) * job.k;
}
__device__ inline float& out_at(const Job& job, const Tile& tile, int sibling, int token, int row) {
    const Part& part = job.parts[tile.part];
    return reinterpret_cast<float*>(
        part.out + token * part.out_stride)[columns_at(job, tile.head, sibling) * part.rows + row];
}
__device__ inline float bias_at(const Job& job, const Tile& tile, int row) {
    const Part& part = job.parts[tile.part];
    return part.bias ? part.bias[size_t(network_of(job, tile)) * part.rows + row] : 0.0f;
}
__device__ inline float inverse_at(const Job& job, const Tile& tile, int row) {
    const Part& part = job.parts[tile.part];
    return part.inverse[size_t(network_of(job, tile)) * part.rows + row];
}

/// A power of two by its exponent, -126 to 127.
__device__ inline float power_of_2(int exponent) { return __uint_as_float(uint32_t(exponent + 127) << 23); }

/// Exponent of the largest magnitude, given its bits (128: infinity or NaN).
__device__ inline int exponent_of(uint32_t magnitude) { return int(magnitude >> 23) - 127; }

__device__ inline uint32_t largest_in_warp(uint32_t x) {
    for (int offset = kWarp / 2; offset; offset /= 2) x = max(x, __shfl_xor_sync(0xffffffff, x, offset));
    return x;
}

/// Activations in 16 bits: rows of x whose largest magnitude is outside [2^-8, 2^15) are scaled by a power of
/// two, and out must be multiplied by `inverse`.
struct Rounded {
    const uint16_t* x;     // [tokens * all_heads(), stride], zeros beyond k
    const float* inverse;  // [tokens * all_heads()]
    int stride;
    int* too_large = nullptr;  // round_rows() sets it to 0, unpack_rows() to 1
};
constexpr int kStep = 64;  // divides `stride`

// Split rows: each number, times a power of two for its row, is the sum of two f16, which leaves 2^-23 of it
// (2^-39 of the row's largest where that is more). Of each kSplitRun numbers the high parts come first.
constexpr int kSplitRun = 16;
/// Where a row has number i's high part; its low part is kSplitRun further.
__host__ __device__ constexpr int split_at(int i) { return i / kSplitRun * 2 * kSplitRun + i % kSplitRun; }
constexpr int split_stride(int k) { return divide_up(2 * k, kStep) * kStep; }

// linear_few.cu: up to kFewTokens tokens.
/// False, and nothing is done, where it cannot be fused with `around`.
bool few_tokens(const Device& device, DType dtype, const Job& job, const Around& around = {});

// linear_round.cu.
void round_rows(const Device& device, const Job& job, bool bf16, const Rounded& to);

// linear_float.cu: F32 weights.
void few_floats(const Device& device, const Job& job);
void split_rows(const Device& device, const Job& job, const Rounded& to);
/// With x split; `workspace`: float_bytes() of memory.
void float_products(const Device& device, const Job& job, const Rounded& x, std::byte* workspace);
size_t float_bytes(const Device& device, const Job& job);

// linear_many.cu. `partial`: split_bytes() of memory.
/// Tiles of so many tokens by rows of the weight; splits: among how many blocks their k is divided.
struct Tiling {
    int tokens, rows, splits;
};
Tiling tiling_of(const Device& device, const Job& job);
/// only_if: a number in device memory; where it is 0 nothing is done.
void many_tokens(const Device& device, DType dtype, const Job& job, const Rounded& x, float* partial,
                 const int* only_if = nullptr);
size_t split_bytes(const Device& device, const Job& job);
/// For a split job.
void many_floats(const Device& device, const Job& job, const Rounded& x, float* partial);
/// For a job with an order.
void many_ordered(const Device& device, DType dtype, const Job& job, const Rounded& x, int tile, int n_tiles);

// linear_unpacked.cu. Unpacks rows [first, first + n) of a quantised part to f16, x.stride apart, as
// many_kernel() does; sets x.too_large if one could exceed f16.
void unpack_rows(const Device& device, DType dtype, const Job& job, int part, int first, int n,
                 const Rounded& x, uint16_t* to);

/// Pairs of tokens and experts, sorted by expert, and where their rows of x are rounded to.
struct Ordered {
    const int32_t* order;
    const Places* places;
    int tile, n_tiles;
    uint16_t* rounded;
    float* inverse;
};
/// How many pairs a tile has.
int ordered_tile(int pairs, int n_experts);

/// out row p = x row p / share times the weight of expert ids[p], plus its bias. Experts begin every `step`
/// rows of a weight; x, ids and out are contiguous. In linear.cu.
void linear_experts(const Device& device, Tensor x, int share, Tensor ids, int64_t step,
                    std::span<const Product> products, const Ordered* ordered);

}  // namespace slimrt::cuda
