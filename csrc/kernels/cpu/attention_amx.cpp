// Products of absorbed rows with softmax weights by AMX tiles, for attention_tiled.h.
#include "kernels/cpu/isa.h"
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

/// Tiles 0 to 3: sums. 4, 5: a. 6, 7: b. In this order a sum is needed again after three other products, 48
/// cycles later.
void multiply(const TileOperands& x, int32_t* sums) {
    constexpr int one = tile_rows * tile_bytes / 4;
    if (x.accumulate) {
        Tiles::load<0>(sums, tile_bytes);
        Tiles::load<1>(sums + one, tile_bytes);
        Tiles::load<2>(sums + 2 * one, tile_bytes);
        Tiles::load<3>(sums + 3 * one, tile_bytes);
    } else {
        Tiles::zero<0>();
        Tiles::zero<1>();
        Tiles::zero<2>();
        Tiles::zero<3>();
    }
    const auto *a = static_cast<const uint8_t*>(x.a), *b = static_cast<const uint8_t*>(x.b);
    const auto a_stride = static_cast<size_t>(x.a_stride), b_stride = static_cast<size_t>(x.b_stride);
    for (int64_t i = 0; i < x.steps; ++i, a += tile_bytes, b += tile_rows * x.b_stride) {
        Tiles::load<6>(b, b_stride);
        Tiles::load<4>(a, a_stride);
        Tiles::multiply_codes<0, 4, 6>();
        Tiles::load<7>(b + x.b_next, b_stride);
        Tiles::multiply_codes<1, 4, 7>();
        Tiles::load<5>(a + x.a_next, a_stride);
        Tiles::multiply_codes<2, 5, 6>();
        Tiles::multiply_codes<3, 5, 7>();
    }
    Tiles::store<0>(sums, tile_bytes);
    Tiles::store<1>(sums + one, tile_bytes);
    Tiles::store<2>(sums + 2 * one, tile_bytes);
    Tiles::store<3>(sums + 3 * one, tile_bytes);
}

void end() { Tiles::release(); }

}  // namespace

extern const TileKernels tile_kernels;
const TileKernels tile_kernels = {begin, multiply, end};

}  // namespace slimrt::cpu::SLIMRT_ISA
