// Attention by AMX tiles: of absorbed rows for attention_tiled.h, and of many queries, whose numbers are
// split into two bf16 each.
#include "core/dtype.h"
#include "kernels/cpu/linear.h"
#include "kernels/cpu/linear_codes.h"
#include "kernels/cpu/linear_tiles.h"
#include SLIMRT_TILES

namespace slimrt::cpu::SLIMRT_ISA {
namespace {

void begin() {
    TileShapes whole;
    for (int tile = 0; tile < 8; ++tile) {
        whole.rows[tile] = tile_rows;
        whole.row_bytes[tile] = tile_bytes;
    }
    Tiles::shape(whole);
}

template <int to, int a, int b>
void add_product(int32_t) {
    Tiles::multiply_codes<to, a, b>();
}
template <int to, int a, int b>
void add_product(float) {
    Tiles::multiply<to, a, b>();
}

/// Tiles 0 to 3: sums. 4, 5: a. 6, 7: b. In this order a sum is needed again after three other products, 48
/// cycles later.
template <bool two, class Sum>  // two: tiles of a
void multiply_tiles(const TileOperands& x, Sum* sums) {
    constexpr int one = tile_rows * tile_bytes / 4;
    Tiles::zero<0>();
    Tiles::zero<1>();
    if constexpr (two) {
        Tiles::zero<2>();
        Tiles::zero<3>();
    }
    if (x.accumulate) {
        Tiles::load<0>(sums, tile_bytes);
        Tiles::load<1>(sums + one, tile_bytes);
        if constexpr (two) {
            Tiles::load<2>(sums + 2 * one, tile_bytes);
            Tiles::load<3>(sums + 3 * one, tile_bytes);
        }
    }
    const auto *a = static_cast<const uint8_t*>(x.a), *b = static_cast<const uint8_t*>(x.b);
    const auto a_stride = static_cast<size_t>(x.a_stride), b_stride = static_cast<size_t>(x.b_stride);
    for (int64_t i = 0; i < x.steps; ++i, a += tile_bytes, b += tile_rows * x.b_stride) {
        Tiles::load<6>(b, b_stride);
        Tiles::load<4>(a, a_stride);
        add_product<0, 4, 6>(Sum());
        Tiles::load<7>(b + x.b_next, b_stride);
        add_product<1, 4, 7>(Sum());
        if constexpr (two) {
            Tiles::load<5>(a + x.a_next, a_stride);
            add_product<2, 5, 6>(Sum());
            add_product<3, 5, 7>(Sum());
        }
    }
    Tiles::store<0>(sums, tile_bytes);
    Tiles::store<1>(sums + one, tile_bytes);
    if constexpr (two) {
        Tiles::store<2>(sums + 2 * one, tile_bytes);
        Tiles::store<3>(sums + 3 * one, tile_bytes);
    }
}

template <class Sum>
void multiply(const TileOperands& x, Sum* sums) {
    x.a_next ? multiply_tiles<true>(x, sums) : multiply_tiles<false>(x, sums);
}

/// Two rows at a time: the 16 numbers that each can have are a table of 32, whose entries codes select.
void fill_q4(const Q4Group& x, void* to) {
    const __m512 codes = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    const __m512i low = _mm512_set1_epi32(0x000f000f), odd = _mm512_set1_epi32(0x00100000);
    const auto* from = static_cast<const uint8_t*>(x.codes);
    auto* out = static_cast<uint8_t*>(to);
    for (int64_t i = 0; i < kBlockTokens; i += 2, from += 2 * x.stride, out += 2 * tile_bytes) {
        const auto row = [&](const uint8_t* at) {
            return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
        };
        const auto table = reinterpret_cast<__m512i>(
            _mm512_cvtne2ps_pbh(_mm512_mul_ps(codes, _mm512_set1_ps(x.scales[i + 1])),
                                _mm512_mul_ps(codes, _mm512_set1_ps(x.scales[i]))));
        const __m512i both = _mm512_or_si512(row(from), _mm512_slli_epi32(row(from + x.stride), 16));
        const __m512i first = _mm512_or_si512(_mm512_and_si512(both, low), odd);
        const __m512i second = _mm512_or_si512(_mm512_srli_epi16(both, 4), odd);
        _mm512_storeu_si512(out, _mm512_permutexvar_epi16(first, table));
        _mm512_storeu_si512(out + tile_bytes, _mm512_permutexvar_epi16(second, table));
    }
}

void end() { Tiles::release(); }

void pack(float* x, int64_t n, float factor) {
    float copy[kMaxPacked];
    for (int64_t i = 0; i < n; i += lanes)
        store(copy + i, (n - i < lanes ? load_part(x + i, n - i) : load(x + i)) * splat(factor));
    tile_pack<2>(copy, n, x);
}

void fill_from_f32(const RowsAt& from, int64_t n, TileColumn to) {
    for (int64_t p = 0; p < n / 2; p += 4) {
        Words words[8];
        load_words(from, static_cast<int>(8 * p), words);
        for (int i = 0; i < 4; ++i) {
            const Vec even = {_mm512_castsi512_ps(words[2 * i])},
                      odd = {_mm512_castsi512_ps(words[2 * i + 1])};
            store_split(to, p + i, even, odd);
        }
    }
}

void scores(const TiledRows& x, float* out, size_t ld) {
    const TileSource source{fill_from_f32, 1, sizeof(float), 1};
    tile_product<2, 2, Tiles>({source, reinterpret_cast<const uint8_t*>(x.rows), nullptr,
                               x.stride * sizeof(float), x.n, reinterpret_cast<const uint8_t*>(x.x),
                               x.x_stride * sizeof(float), x.n_x, x.dim, out, ld});
}

void values(const TiledRows& x, const float* factor, float* out, size_t out_stride) {
    constexpr int64_t some = 2 * tile_rows;
    TilePanel<2> panel;
    TileProducts<Tiles> products;
    const int64_t padded = tile_padded(x.n);
    const size_t x_stride = x.x_stride * sizeof(float);
    for (int64_t c = 0; c < x.dim; c += some) {
        const int64_t columns = least(x.dim - c, some);
        for (int64_t j = 0; j < columns; j += lanes) {
            for (int64_t i = 0; i < padded; i += 2) {
                const float* const row = x.rows + i * x.stride + c + j;
                const Vec even = i < x.n ? load(row) : splat(0),
                          odd = i + 1 < x.n ? load(row + x.stride) : splat(0);
                store_split({panel.at + j / lanes * panel.column, panel.plane}, i / 2, even, odd);
            }
        }
        for (int64_t t = 0; t < x.n_x; t += some) {
            alignas(64) float sums[some][some];
            const int64_t n = least(x.n_x - t, some);
            products.shape(n, columns);
            products.add<2, 2>(panel, reinterpret_cast<const uint8_t*>(x.x + t * x.x_stride), x_stride,
                               tile_packed_bytes<1>(x.n), padded / tile_elements, false, sums[0]);
            for (int64_t k = 0; k < n; ++k) {
                for (int64_t j = 0; j < columns; j += lanes) {
                    float* const at = out + (t + k) * out_stride + c + j;
                    const Vec added = load(sums[k] + j);
                    store(at, factor[t + k] == 0 ? added : fma(splat(factor[t + k]), load(at), added));
                }
            }
        }
    }
}

}  // namespace

extern const TileKernels tile_kernels;
const TileKernels tile_kernels = {begin, multiply, multiply, end, fill_q4, pack, scores, values};

}  // namespace slimrt::cpu::SLIMRT_ISA
