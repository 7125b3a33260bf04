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
/// cycles later. fill(step) writes b of a step: a step before it is needed, since tiles wait for what has
/// just been stored. two: tiles of a.
template <bool two, class Sum, class Fill>
void multiply_tiles(const TileOperands& x, const Fill& fill, Sum* sums) {
    constexpr int one = tile_rows * tile_bytes / 4;
    Tiles::zero<0>();
    Tiles::zero<1>();
    if constexpr (two) {
        Tiles::zero<2>();
        Tiles::zero<3>();
    }
    const auto *a = static_cast<const uint8_t*>(x.a), *b = static_cast<const uint8_t*>(x.b);
    const auto a_stride = static_cast<size_t>(x.a_stride), b_stride = static_cast<size_t>(x.b_stride);
    fill(0);
    for (int64_t i = 0; i < x.steps; ++i, a += tile_bytes, b += tile_rows * x.b_stride) {
        if (i + 1 < x.steps) fill(i + 1);
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

template <class Sum, class Fill>
void multiply_filled(const TileOperands& x, const Fill& fill, Sum* sums) {
    x.a_next ? multiply_tiles<true>(x, fill, sums) : multiply_tiles<false>(x, fill, sums);
}

void multiply(const TileOperands& x, float* sums) {
    multiply_filled(x, [](int64_t) {}, sums);
}

constexpr int64_t kQuadBytes = 2 * tile_bytes;  // of 32 columns of four rows

/// Transposes 32 columns of the rows of a block to quads of one column.
void transpose_block(const char* from, int64_t stride, char* to) {
    // Lane l (128 bits) of two rows gets columns 4 l ... 4 l + 3 of each 16, so that unpacking within lanes
    // leaves the columns in order.
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (int64_t i = 0; i < kBlockTokens; i += 8, from += 8 * stride, to += 2 * kQuadBytes) {
        const auto row = [&](int j) {
            return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + j * stride));
        };
        const auto rows = [&](int j) {
            const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(row(j)), row(j + 4), 1);
            return _mm512_permutexvar_epi32(order, both);
        };
        const __m512i a = rows(0), b = rows(1), c = rows(2), d = rows(3);
        const __m512i low_ab = _mm512_unpacklo_epi8(a, b), high_ab = _mm512_unpackhi_epi8(a, b);
        const __m512i low_cd = _mm512_unpacklo_epi8(c, d), high_cd = _mm512_unpackhi_epi8(c, d);
        _mm512_store_si512(to, _mm512_unpacklo_epi16(low_ab, low_cd));
        _mm512_store_si512(to + tile_bytes, _mm512_unpackhi_epi16(low_ab, low_cd));
        _mm512_store_si512(to + kQuadBytes, _mm512_unpacklo_epi16(high_ab, high_cd));
        _mm512_store_si512(to + kQuadBytes + tile_bytes, _mm512_unpackhi_epi16(high_ab, high_cd));
    }
}

/// A step is transposed while the one before it is multiplied, and what the next pairs meet stays in L1.
void multiply_rows(const TiledCodes& x, int32_t* sums) {
    constexpr int64_t kBlocks = tile_bytes / kBlockTokens;  // of a step
    alignas(64) char b[kAbsorbedRows / 4 * kQuadBytes];
    for (int64_t pair = 0; pair < x.n_pairs; pair += 2 * tile_rows, sums += kTiledSums) {
        const auto fill = [&](int64_t step) {
            for (int64_t i = step * kBlocks; pair == 0 && i < (step + 1) * kBlocks; ++i) {
                if (const auto* const block = static_cast<const char*>(x.blocks[i]))
                    transpose_block(block + x.offset, x.stride, b + i * kBlockTokens / 4 * kQuadBytes);
            }
        };
        multiply_filled({.a = static_cast<const uint8_t*>(x.weights) + pair * x.weights_stride,
                         .a_stride = x.weights_stride,
                         .a_next = x.n_pairs - pair > tile_rows ? tile_rows * x.weights_stride : 0,
                         .b = b,
                         .b_stride = kQuadBytes,
                         .b_next = tile_bytes,
                         .steps = x.steps},
                        fill, sums);
    }
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
const TileKernels tile_kernels = {begin, multiply_rows, multiply, end, fill_q4, pack, scores, values};

}  // namespace slimrt::cpu::SLIMRT_ISA
