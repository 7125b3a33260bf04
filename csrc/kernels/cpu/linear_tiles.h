// Products with many tokens by AMX tiles of bf16, see tiles.h. A panel of rows is unpacked once for all
// tokens. Quantised weights and their activations are rounded to bf16, with an error of at most 1/256 of each
// value; int8 activations err by up to 1/254 of the largest of 32. F16 weights, and activations of F16 and
// BF16 weights, are split into two bf16 (the value rounded, and its rounding error): 16 bits, for three
// products.
#pragma once

#include "kernels/cpu/linear_quant.h"
#include "kernels/cpu/linear_unpack.h"
#include "kernels/cpu/tile_shapes.h"

namespace slimrt::cpu::SLIMRT_ISA {

constexpr int64_t tile_elements = tile_bytes / 2;  // of a row in one tile

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/// Two vectors rounded to bf16, element i of both side by side.
static inline __m512i bf16_pairs(Vec even, Vec odd) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23,
                                           7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd.v, even.v));
    return _mm512_permutexvar_epi16(order, both);
}

/// The rounding error of a, whose bf16 is `of`; 0 for infinities.
static inline Vec bf16_residual(Vec a, __m512i of) {
    const __m512 bf16 = _mm512_castsi512_ps(of);
    return {_mm512_maskz_sub_ps(_mm512_cmp_ps_mask(a.v, bf16, _CMP_NEQ_UQ), a.v, bf16)};
}
static inline Vec residual_of_even(Vec a, __m512i pairs) {
    return bf16_residual(a, _mm512_slli_epi32(pairs, 16));
}
static inline Vec residual_of_odd(Vec a, __m512i pairs) {
    return bf16_residual(a, _mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}

/// A packed row of k activations, padded with zeros to a multiple of 32: as bf16, then (planes = 2) the
/// rounding errors as bf16.
static inline int64_t tile_padded(int64_t k) { return (k + tile_elements - 1) & -tile_elements; }

template <int planes>
static size_t tile_packed_bytes(int64_t k) {
    return static_cast<size_t>(tile_padded(k) * planes * 2);
}

template <int planes>
void tile_pack(const float* x, int64_t k, void* out) {
    uint8_t* const to = static_cast<uint8_t*>(out);
    const int64_t plane = tile_padded(k) * 2;
    for (int64_t i = 0; i < tile_padded(k); i += lanes) {
        const Vec a = k - i >= lanes ? load(x + i) : k > i ? load_part(x + i, k - i) : splat(0);
        const auto bf16 = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a.v));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 2 * i), bf16);
        if constexpr (planes == 2) {
            const Vec left = bf16_residual(a, _mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + plane + 2 * i),
                                reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(left.v)));
        }
    }
}

/// Where 16 rows go as tiles, one after another, a lane for each row; the second plane is `plane` bytes
/// further.
struct TileColumn {
    uint8_t* to;
    size_t plane;

    uint8_t* pair(int64_t p) const { return to + p * tile_bytes; }
};

/// The sink of unpack(): dequantises one block to bf16.
template <class Weight>
struct TileCodes {
    TileColumn to;
    Vec scales[Weight::block / Weight::group], lowest[Weight::block / Weight::group];

    void scale(int group, Vec s) {
        scales[group] = s;
        if (!Weight::has_min) lowest[group] = s * splat(-Weight::offset);
    }
    void minimum(int group, Vec m) { lowest[group] = splat(0) - m; }
    void quads(int at, const Words (&words)[8]) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            const int group = 4 * (at + i) / Weight::group;
            const auto value = [&](int j) { return fma(byte_of(words[i], j), scales[group], lowest[group]); };
            store_words(to.pair(2 * (at + i)), bf16_pairs(value(0), value(1)));
            store_words(to.pair(2 * (at + i) + 1), bf16_pairs(value(2), value(3)));
        }
    }
};

/// Converts n elements (a multiple of 32) of 16 rows to tiles.
using FillTiles = void (*)(const RowsAt& from, int64_t n, TileColumn to);

template <class Weight>
static void fill_from_codes(const RowsAt& from, int64_t n, TileColumn to) {
    for (int64_t b = 0; b < n / Weight::block; ++b) {
        TileCodes<Weight> codes{to, {}, {}};
        codes.to.to += b * Weight::block / 2 * tile_bytes;
        unpack(blocks_at<Weight>(from(0), from.stride, 0, b),
               static_cast<const typename Weight::Block*>(nullptr), codes);
    }
}

/// Splits two elements of 16 rows, those of pair p, into two bf16 each.
static inline void store_split(TileColumn to, int64_t p, Vec even, Vec odd) {
    const __m512i first = bf16_pairs(even, odd);
    store_words(to.pair(p), first);
    store_words(to.pair(p) + to.plane,
                bf16_pairs(residual_of_even(even, first), residual_of_odd(odd, first)));
}

[[maybe_unused]] static void fill_from_f16(const RowsAt& from, int64_t n, TileColumn to) {
    for (int64_t p = 0; p < n / 2; p += 8) {
        Words pairs[8];
        load_words(from, static_cast<int>(4 * p), pairs);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            store_split(to, p + i, half_of(pairs[i], 0), half_of(pairs[i], 1));
        }
    }
}

[[maybe_unused]] static void fill_from_bf16(const RowsAt& from, int64_t n, TileColumn to) {
    for (int64_t p = 0; p < n / 2; p += 8) {
        Words pairs[8];
        load_words(from, static_cast<int>(4 * p), pairs);
        for (int i = 0; i < 8; ++i) store_words(to.pair(p + i), pairs[i]);
    }
}

/// The layout of the rows of a type, and their conversion to tiles.
struct TileSource {
    FillTiles fill;
    int64_t block, block_bytes, interleaved;  // interleaved: rows side by side, or 1

    int64_t bytes(int64_t n) const { return n / block * block_bytes; }
    /// The offset of element i in the first of `interleaved` rows.
    int64_t offset(int64_t i) const { return interleaved * bytes(i); }
};

/// Up to 32 rows of up to 256 elements as tiles.
template <int planes>
struct TilePanel {
    static constexpr int64_t elements = 256, rows = 2 * tile_rows;
    static constexpr size_t column = elements / 2 * tile_bytes, plane = 2 * column;

    alignas(64) uint8_t at[planes * plane];

    /// Converts elements [0, n) of n_rows rows, padded with zeros to a multiple of 32.
    void fill(const TileSource& source, const uint8_t* w, size_t w_stride, int64_t n_rows, int64_t n) {
        for (int64_t r = 0; r < n_rows; r += tile_rows) {
            const TileColumn to{at + r / tile_rows * column, plane};
            const RowsAt from{w + r * w_stride, w_stride};
            if (n_rows - r >= tile_rows && n % tile_elements == 0)
                source.fill(from, n, to);
            else
                fill_part(source, from, n_rows - r < tile_rows ? n_rows - r : tile_rows, n, to);
        }
    }

  private:
    static void fill_part(const TileSource& source, const RowsAt& from, int64_t n_rows, int64_t n,
                          TileColumn to) {
        constexpr size_t stride = 4 * elements + 64;  // of F32, the widest type
        alignas(64) uint8_t copy[tile_rows * stride] = {};
        for (int64_t r = 0; r < n_rows; ++r)
            memcpy(copy + r * stride, from(static_cast<int>(r)), static_cast<size_t>(source.bytes(n)));
        source.fill(RowsAt{copy, stride}, tile_padded(n), to);
    }
};

/// The tile registers. 0 to 3: sums of 16 tokens for 16 rows each. 4, 5: activations. 6, 7: weights.
template <class Tiles>
class TileProducts {
  public:
    ~TileProducts() { Tiles::release(); }

    /// Configures the tiles for up to 32 tokens and 32 rows.
    void shape(int64_t tokens, int64_t rows) {
        if (tokens == tokens_ && rows == rows_) return;
        tokens_ = tokens;
        rows_ = rows;
        TileShapes shapes;
        for (int i = 0; i < 2; ++i) {
            const auto clamp = [&](int64_t n) {
                const int64_t left = n - i * tile_rows;
                return static_cast<uint8_t>(left < 1 ? 1 : left < tile_rows ? left : tile_rows);
            };
            for (int j = 0; j < 2; ++j) {
                shapes.rows[i + 2 * j] = clamp(tokens);
                shapes.row_bytes[2 * i + j] = static_cast<uint16_t>(4 * clamp(rows));
            }
            shapes.rows[4 + i] = clamp(tokens);
            shapes.row_bytes[4 + i] = tile_bytes;
            shapes.rows[6 + i] = tile_rows;
            shapes.row_bytes[6 + i] = static_cast<uint16_t>(4 * clamp(rows));
        }
        Tiles::shape(shapes);
    }

    /// sums[token][32] (+)= the first `steps` * 32 elements of the panel times the tokens; strides in bytes.
    template <int planes, int x_planes>
    void add(const TilePanel<planes>& panel, const uint8_t* x, size_t x_stride, size_t x_plane, int64_t steps,
             bool accumulate, float* sums) const {
        const auto with = [&](auto tokens, auto rows) {
            add_tiles<planes, x_planes, tokens, rows>(panel, x, x_stride, x_plane, steps, accumulate, sums);
        };
        using One = Number<1>;
        using Two = Number<2>;
        if (tokens_ > tile_rows)
            rows_ > tile_rows ? with(Two{}, Two{}) : with(Two{}, One{});
        else
            rows_ > tile_rows ? with(One{}, Two{}) : with(One{}, One{});
    }

    /// One step of 32 elements: T * 16 tokens times R * 16 rows.
    template <int T, int R>
    static void multiply() {
        Tiles::template multiply<0, 4, 6>();
        if constexpr (R == 2) Tiles::template multiply<2, 4, 7>();
        if constexpr (T == 2) Tiles::template multiply<1, 5, 6>();
        if constexpr (T == 2 && R == 2) Tiles::template multiply<3, 5, 7>();
    }

  private:
    template <int n>
    struct Number {
        constexpr operator int() const { return n; }
    };

    template <int T>
    static void load_tokens(const uint8_t* x, size_t stride) {
        Tiles::template load<4>(x, stride);
        if constexpr (T == 2) Tiles::template load<5>(x + tile_rows * stride, stride);
    }
    template <int R>
    static void load_rows(const uint8_t* w, size_t column) {
        Tiles::template load<6>(w, tile_bytes);
        if constexpr (R == 2) Tiles::template load<7>(w + column, tile_bytes);
    }
    template <int planes, int x_planes, int T, int R>
    static void add_tiles(const TilePanel<planes>& panel, const uint8_t* x, size_t x_stride, size_t x_plane,
                          int64_t steps, bool accumulate, float* sums) {
        constexpr size_t stride = 2 * tile_bytes;
        const auto each_sum = [&](auto&& with) {  // its number, its address
            with(Number<0>{}, sums);
            if constexpr (T == 2) with(Number<1>{}, sums + tile_rows * stride / 4);
            if constexpr (R == 2) with(Number<2>{}, sums + tile_rows);
            if constexpr (T == 2 && R == 2) with(Number<3>{}, sums + tile_rows * stride / 4 + tile_rows);
        };
        each_sum([&](auto tile, float* at) {
            if (accumulate)
                Tiles::template load<tile>(at, stride);
            else
                Tiles::template zero<tile>();
        });
        for (int64_t i = 0; i < steps; ++i) {
            const uint8_t *const w = panel.at + i * tile_rows * tile_bytes, *const of = x + i * tile_bytes;
            load_tokens<T>(of, x_stride);
            if constexpr (planes == 2) {
                load_rows<R>(w + panel.plane, panel.column);
                multiply<T, R>();
            }
            load_rows<R>(w, panel.column);
            multiply<T, R>();
            if constexpr (x_planes == 2) {
                load_tokens<T>(of + x_plane, x_stride);
                multiply<T, R>();
            }
        }
        each_sum([&](auto tile, float* at) { Tiles::template store<tile>(at, stride); });
    }

    int64_t tokens_ = 0, rows_ = 0;
};

/// Sums of a block of tokens and rows, 32 rows side by side. In the output tokens are pages apart, often a
/// power of two, and would compete for the same cache sets.
struct TileSums {
    static constexpr int64_t tokens = 512, rows = 128, columns = 2 * tile_rows;

    alignas(64) float at[rows / columns][tokens][columns];

    void copy(int64_t n_tokens, int64_t n_rows, float* out, size_t out_stride) const {
        for (int64_t t = 0; t < n_tokens; ++t) {
            for (int64_t r = 0; r < n_rows; r += lanes) {
                const Vec of_rows = load(at[r / columns][t] + r % columns);
                if (n_rows - r >= lanes)
                    store(out + t * out_stride + r, of_rows);
                else
                    store_part(out + t * out_stride + r, of_rows, n_rows - r);
            }
        }
    }
};

/// A product of n_rows rows of k elements with n_tokens tokens.
struct TileWork {
    TileSource source;
    const uint8_t *w, *next;  // next: the rows that are unpacked after these
    size_t w_stride;
    int64_t n_rows;
    const uint8_t* x;
    size_t x_stride;
    int64_t n_tokens, k;
    float* out;
    size_t out_stride;
};

/// A panel from element `first` on times a block of tokens, while the next panel is prefetched.
template <int planes, int x_planes, class Tiles>
void tile_panel_product(const TilePanel<planes>& panel, TileProducts<Tiles>* products, const TileWork& work,
                        int64_t first, float (*sums)[TileSums::columns]) {
    constexpr int64_t at_once = 2 * tile_rows;
    const int64_t n = least(work.k - first, panel.elements);
    for (int64_t t = 0; t < work.n_tokens; t += at_once) {
        products->shape(least(work.n_tokens - t, at_once), work.n_rows);
        products->template add<planes, x_planes>(panel, work.x + t * work.x_stride + 2 * first, work.x_stride,
                                                 tile_packed_bytes<1>(work.k), tile_padded(n) / tile_elements,
                                                 first > 0, sums[t]);
        const int64_t upto = least((t + at_once) * work.n_rows / work.n_tokens, work.n_rows);
        for (int64_t r = t * work.n_rows / work.n_tokens; r < upto; ++r) {
            const int64_t beside = r % work.source.interleaved, bytes = work.source.bytes(n);
            const uint8_t* const next = work.next + (r - beside) * work.w_stride + beside * bytes;
            for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(next + i, 0, 2);
        }
    }
}

template <int planes, int x_planes, class Tiles>
void tile_product(const TileWork& all) {
    using Panel = TilePanel<planes>;
    Panel panel;
    TileSums sums;
    TileProducts<Tiles> products;
    TileWork work = all;
    for (int64_t token = 0; token < all.n_tokens; token += sums.tokens) {
        work.x = all.x + token * all.x_stride;
        work.n_tokens = least(all.n_tokens - token, sums.tokens);
        for (int64_t row = 0; row < all.n_rows; row += sums.rows) {
            const int64_t rows = least(all.n_rows - row, sums.rows);
            // One panel's width of the activations and the sums stay in the cache.
            for (int64_t first = 0; first < all.k; first += Panel::elements) {
                for (int64_t r = 0; r < rows; r += Panel::rows) {
                    work.w = all.w + (row + r) * all.w_stride;
                    work.n_rows = least(rows - r, Panel::rows);
                    const bool last = r + Panel::rows >= rows,
                               of_all = last && first + Panel::elements >= all.k;
                    const int64_t next_row = of_all ? row + sums.rows : last ? row : row + r + Panel::rows;
                    const int64_t next_first = of_all ? 0 : last ? first + Panel::elements : first;
                    work.next = all.w + next_row * all.w_stride + all.source.offset(next_first);
                    panel.fill(all.source, work.w + all.source.offset(first), all.w_stride, work.n_rows,
                               least(all.k - first, Panel::elements));
                    tile_panel_product<planes, x_planes>(panel, &products, work, first,
                                                         sums.at[r / Panel::rows]);
                }
            }
            sums.copy(work.n_tokens, rows, all.out + token * all.out_stride + row, all.out_stride);
        }
    }
}

}  // namespace slimrt::cpu::SLIMRT_ISA
