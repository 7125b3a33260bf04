// The kernels of the instruction set `amx`: products with many tokens by AMX tiles. The rest is that of
// avx512.
#include "core/dtype.h"
#include "kernels/cpu/linear.h"
#include "kernels/cpu/linear_codes.h"
#include "kernels/cpu/linear_tiles.h"
#include SLIMRT_TILES

namespace slimrt::cpu::SLIMRT_ISA {

/// planes, x_planes: how many bf16 a weight and an activation are split into. min_tokens: from how many
/// tokens tiles are faster although more is unpacked; for floats, from how many the int16 kernel (which
/// rounds more) would serve. interleaved: rows side by side, or 1.
template <FillTiles fill, class Block, int64_t block, int planes, int x_planes, int64_t min_tokens,
          int64_t interleaved = 1>
static constexpr LinearKernel with_tiles(DType type) {
    const auto product = [](const void* w, size_t w_stride, int64_t n_rows, const void* x, size_t x_stride,
                            int64_t n_tokens, int64_t k, float* out, size_t out_stride, Access) {
        const TileSource source{fill, block, sizeof(Block), interleaved};
        tile_product<planes, x_planes, Tiles>({source, static_cast<const uint8_t*>(w), nullptr, w_stride,
                                               n_rows, static_cast<const uint8_t*>(x), x_stride, n_tokens, k,
                                               out, out_stride});
    };
    return {static_cast<uint32_t>(type), min_tokens, tile_packed_bytes<x_planes>, tile_pack<x_planes>,
            product};
}

template <class Weight>
static constexpr LinearKernel coded_tiles(DType type) {
    constexpr int64_t rows = is_interleaved<Weight> ? kInterleavedRows : 1;
    return with_tiles<fill_from_codes<Weight>, typename Weight::Block, Weight::block, 1, 1, 64, rows>(type);
}

/// The types of IQ2 and IQ3, Q2_K, Q4_1 and Q5_1 are left to AVX-512: they are rare, and their code would
/// make the wheel larger.
const LinearKernel linear_kernels[] = {
    with_tiles<fill_from_f16, Half, 1, 2, 2, Int16Products::min_tokens>(DType::F16),
    with_tiles<fill_from_bf16, BFloat16, 1, 1, 2, Int16Products::min_tokens>(DType::BF16),
    coded_tiles<WeightQ8_0>(DType::Q8_0),
    coded_tiles<Interleaved<WeightQ4_0>>(DType::Q4_0_R16),
    coded_tiles<WeightQ6_K>(DType::Q6_K),
    coded_tiles<Interleaved<WeightIQ4_NL>>(DType::IQ4_NL_R16),
    coded_tiles<Interleaved<WeightIQ4_XS>>(DType::IQ4_XS_R16),
    coded_tiles<Interleaved<WeightMXFP4>>(DType::MXFP4_R16),
    coded_tiles<WeightTQ2_0>(DType::TQ2_0),
    coded_tiles<Interleaved<WeightQ5_0>>(DType::Q5_0_R16),
    coded_tiles<Interleaved<WeightQ3_K>>(DType::Q3_K_R16),
    coded_tiles<Interleaved<WeightQ4_K>>(DType::Q4_K_R16),
    coded_tiles<Interleaved<WeightQ5_K>>(DType::Q5_K_R16),
    {0, 0, nullptr, nullptr, nullptr},
};

/// A product of tiles is 16 x 16 x 32 multiply-adds; F16 needs three of them for one, BF16 two.
int64_t busy(uint32_t type, int64_t rounds, float* out) {
    if (type == static_cast<uint32_t>(DType::F32)) return busy_floats(rounds, out);
    TileProducts<Tiles> products;
    products.shape(32, 32);
    for (int64_t i = 0; i < rounds; ++i) products.multiply<2, 2>();
    Tiles::store<0>(operands, 0);
    memcpy(out, operands, sizeof(Vec));
    const int each = type == static_cast<uint32_t>(DType::F16)    ? 3
                     : type == static_cast<uint32_t>(DType::BF16) ? 2
                                                                  : 1;
    return rounds * 4 * tile_rows * tile_rows * tile_elements / each;
}

}  // namespace slimrt::cpu::SLIMRT_ISA
