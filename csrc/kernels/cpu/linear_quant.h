// Products of quantised weights. Activations are quantised to int8 in groups of 32 with an f32 scale. One
// token: row by row, limited by memory (this file). A few: rows side by side (linear_few.h). Many: panels
// (linear_panel.h).
#pragma once

#include "kernels/cpu/linear_types.h"

namespace slimrt::cpu::SLIMRT_ISA {

/// A packed row of k activations, padded with zeros to a multiple of `whole`: the int8 codes; an f32 scale
/// for each 32; for each group of the weight minus the sum of its codes: times the weight's offset as int32
/// (starting at sum_bias) or, for types with minima, times the scale as f32.
struct Activations {
    const uint8_t *codes, *scales, *sums;

    static constexpr int64_t whole = 128;  // a multiple of every unit (see linear_types.h) of blocks of 32
    static int64_t padded(int64_t k) { return (k + whole - 1) & -whole; }
    Activations(const uint8_t* row, int64_t k)
        : codes(row), scales(row + padded(k)), sums(row + padded(k) + padded(k) / 8) {}
    /// The row that lies so many bytes further.
    Activations moved(size_t bytes) const {
        Activations a = *this;
        a.codes += bytes;
        a.scales += bytes;
        a.sums += bytes;
        return a;
    }
};

/// The layout of packed activations; weight types with the same layout share the packed rows.
template <int group_, bool has_min_, int offset_>
struct PackedAs {
    static constexpr int group = group_, offset = offset_;
    static constexpr bool has_min = has_min_;

    static size_t bytes(int64_t k) {
        const int64_t n = Activations::padded(k);
        return static_cast<size_t>((n + n / 8 + n / group * 4 + 63) & -64);
    }
};
template <class Weight>
using PackedFor = PackedAs<Weight::group, Weight::has_min, Weight::offset>;

/// Quantises 32 activations to int8; returns their scale, which is infinite or NaN if one of them is.
static inline float round_codes(const float* x, int8_t* codes) {
    const float max = largest(x, 32), inverse = max > 1e-35f ? 127 / max : 0;
    for (int i = 0; i < 32; ++i) codes[i] = static_cast<int8_t>(nearest_even(f32_at(x + i) * inverse));
    return max / 127;
}

template <class As>
static void pack(const float* x, int64_t k, void* out) {
    constexpr int group = As::group;
    uint8_t* codes_to = static_cast<uint8_t*>(out);
    uint8_t* scales_to = codes_to + Activations::padded(k);
    uint8_t* sums_to = scales_to + Activations::padded(k) / 8;
    memset(out, 0, As::bytes(k));
    for (int64_t b = 0; b < k / 32; ++b) {
        int8_t codes[32];
        const float scale = round_codes(x + 32 * b, codes);
        memcpy(codes_to + 32 * b, codes, 32);
        memcpy(scales_to + 4 * b, &scale, 4);
        for (int g = 0; g < 32 / group; ++g) {
            int32_t total = 0;
            for (int i = 0; i < group; ++i) total += codes[g * group + i];
            const int32_t start = sum_bias - As::offset * total;
            const float scaled = -scale * static_cast<float>(total);
            const uint32_t stored = As::has_min ? u32_at(&scaled) : u32_at(&start);
            memcpy(sums_to + 4 * (b * 32 / group + g), &stored, 4);
        }
    }
}

template <class Weight>
constexpr int blocks_of_unit = Weight::unit / Weight::block;

/// The blocks of unit u of a row of k elements. At the end of a row a unit may have fewer: they are copied to
/// `padded` and followed by zeros.
template <class Weight>
static inline const typename Weight::Block* unit_at(
    const uint8_t* row, int64_t u, int64_t k, typename Weight::Block (&padded)[blocks_of_unit<Weight>]) {
    const auto* blocks = reinterpret_cast<const typename Weight::Block*>(row) + u * blocks_of_unit<Weight>;
    if (Weight::unit == Weight::block || (u + 1) * Weight::unit <= k) [[likely]]
        return blocks;
    constexpr int last = blocks_of_unit<Weight> - 1;
    const int64_t left = (k - u * Weight::unit) / Weight::block;
    padded[0] = blocks[0];
    for (int b = 1; b < last; ++b) padded[b] = b < left ? blocks[b] : typename Weight::Block{};
    padded[last] = {};
    return padded;
}

/// Whether one token takes fewer instructions with interleaved rows than with single rows. With vectors of 4
/// lanes it does not: on a Cortex-A76 Q4_K would take 0.44 cycles a byte instead of 0.28 (llvm-mca).
constexpr bool interleaving_pays = lanes >= 8;

/// Types without a kernel for each number of tokens, which would make the wheel larger.
template <class Weight>
constexpr bool is_rare = requires {
    Weight::is_rare;
} || (requires { Weight::is_rare_alone; } && interleaving_pays && !is_interleaved<Weight>);

/// How many quads of products are added in 16 bits (PanelPairs) without overflow, a power of two; 1: none.
template <class Weight>
constexpr int quads_per_pair = [] {
    int max_code = 63, fours = 1;
    if constexpr (requires { Weight::max_code; }) max_code = Weight::max_code;
    while (!Weight::is_wide && fours < Weight::group / 4 &&
           2 * fours * (2 * 127 * max_code) <= PanelPairs::max)
        fours *= 2;
    return fours;
}();

/// Whether the bytes of a weight are the limit with one token and with two: more than 0.8 a weight.
template <class Weight>
constexpr bool is_memory_bound = sizeof(typename Weight::Block) * 5 > Weight::block * 4;

/// The prefetch of products by rows with two tokens or more.
constexpr Access few_tokens_access = {Hint::t1, dot_rows > 1, (dot_rows > 1 ? 16 : 8) << 10};

/// Whether the groups' offsets are added with their scales, a unit's at once, rather than as starting values:
/// where a lane is a group that takes no shuffle.
template <class Weight>
constexpr bool offsets_apart = Weight::group == 16 && !Weight::has_min && __is_same(Acc, Scales);

/// The starting values of 64 products: the offsets of their groups, see Activations.
template <class Weight>
static inline auto start_at(const Activations& x, int64_t i) {
    const uint8_t* sums = x.sums + i * (64 / Weight::group * 4);
    if constexpr ((Weight::offset == 0 && Weight::group == 32) || offsets_apart<Weight>)
        return zero_sums();
    else if constexpr (Weight::group == 32)
        return start_halves(sums);
    else
        return start_quarters(sums);
}

/// The factors of the weight scales of unit u: the scales of the activations (for minima: the sums).
template <class Weight>
static inline Scales scales_of_unit(const Activations& x, int64_t u) {
    const uint8_t* scales = x.scales + u * (Weight::unit / 32 * 4);
    if constexpr (Weight::unit > Weight::block)
        return load_blocks(scales);
    else if constexpr (Weight::group == 32)
        return load_eight(scales, Weight::has_min ? x.sums + 32 * u : scales);
    else
        return load_each_twice(scales);
}

/// Rows, R at a time, times T tokens; codes and scales of a row are unpacked once for all tokens. Inlined at
/// both calls, one token of Q8_0 took 1.17 times as long (g++ 12).
template <class Weight, int R, int T>
[[gnu::noinline]] static void row_product(const uint8_t* w, size_t w_stride, int64_t n_rows, const uint8_t* x,
                                          size_t x_stride, int64_t k, float* out, size_t out_stride,
                                          Access access) {
    using Block = typename Weight::Block;
    constexpr int steps = Weight::unit / 64, bytes = blocks_of_unit<Weight> * sizeof(Block);
    const Activations first(x, k);
    const auto token = [=](int t) { return first.moved(t * x_stride); };
    for (int64_t row = 0; row < n_rows; row += R, w += R * w_stride) {
        const PrefetchTarget<R> target(w, w_stride, access);
        Acc acc[R][T] = {};
        for (int64_t u = 0; u * Weight::unit < k; ++u) {
            Block padded[R][blocks_of_unit<Weight>];
            const Block* blocks[R];
            const uint8_t* const ahead = target.at(u * bytes);
            Scales scales[R][T];
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                blocks[r] = unit_at<Weight>(w + r * w_stride, u, k, padded[r]);
                prefetch<true>(ahead + r * w_stride, bytes, T == 1 ? access.hint : few_tokens_access.hint);
                const Scales of_row = Weight::scales(blocks[r]);
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t) {
                    scales[r][t] = of_row * scales_of_unit<Weight>(token(t), u);
                    if constexpr (Weight::has_min)
                        acc[r][t] = add_last_eight(acc[r][t], scales[r][t]);
                    else if constexpr (offsets_apart<Weight>)
                        acc[r][t] = fma(to_acc(load_codes(token(t).sums + 64 * u)), scales[r][t], acc[r][t]);
                }
            }
            decltype(start_at<Weight>(first, 0)) pending[R][T];  // sums of even steps, where joins_steps
#pragma GCC unroll 4
            for (int j = 0; j < steps; ++j) {
                Codes of_rows[R];
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) of_rows[r] = Weight::codes(blocks[r], j);
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t) {
                    const Codes codes = load_codes(token(t).codes + 64 * (u * steps + j));
                    const auto start = start_at<Weight>(token(t), u * steps + j);
#pragma GCC unroll 4
                    for (int r = 0; r < R; ++r) {
                        const auto sums = dot<Weight::is_wide>(start, of_rows[r], codes);
                        const Acc s = Weight::group == 32 ? spread_halves(scales[r][t], j)
                                                          : spread_quarters(scales[r][t], j);
                        if constexpr (!joins_steps || Weight::group != 32)
                            acc[r][t] = fma(to_acc(sums), s, acc[r][t]);
                        else if (j % 2 == 0)
                            pending[r][t] = sums;
                        else
                            acc[r][t] = fma(to_acc(pending[r][t], sums), s, acc[r][t]);
                    }
                }
            }
        }
        for (int r = 0; r < R; ++r) {
            for (int t = 0; t < T; ++t) out[t * out_stride + row + r] = sum(acc[r][t]);
        }
    }
}

using RowProduct = void (*)(const uint8_t* w, size_t w_stride, int64_t n_rows, const uint8_t* x,
                            size_t x_stride, int64_t k, float* out, size_t out_stride, Access access);

/// Rows [first, n_rows), R at a time, times tokens, two tokens at a time where memory is the limit with two
/// as well; returns the first row that is left. With more tokens these are the rows that whole panels leave.
template <class Weight, int R>
static int64_t product_by_rows(const uint8_t* w, size_t w_stride, int64_t first, int64_t n_rows,
                               const uint8_t* x, size_t x_stride, int64_t n_tokens, int64_t k, float* out,
                               size_t out_stride, Access access) {
    constexpr int max_tile =
        is_memory_bound<Weight> && R == dot_rows ? 2 : 1;  // R < dot_rows: the last few rows
    static constexpr RowProduct tiles[] = {row_product<Weight, R, 1>, row_product<Weight, R, max_tile>};
    const int64_t n_tiles = (n_tokens + max_tile - 1) / max_tile;
    const int64_t end_row = n_rows - (n_rows - first) % R, step = n_tiles == 1 ? end_row - first : R;
    for (int64_t r = first; r < end_row; r += step) {
        for (int64_t tile = 0; tile < n_tiles; ++tile) {
            const int64_t t = tile * n_tokens / n_tiles, end = (tile + 1) * n_tokens / n_tiles;
            tiles[end - t - 1](w + r * w_stride, w_stride, step, x + t * x_stride, x_stride, k,
                               out + t * out_stride + r, out_stride, access);
        }
    }
    return end_row;
}

}  // namespace slimrt::cpu::SLIMRT_ISA
