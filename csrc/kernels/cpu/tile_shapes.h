// AMX has 8 tile registers of up to 16 rows of 64 bytes.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace slimrt::cpu::SLIMRT_ISA {

constexpr int tile_rows = 16, tile_bytes = 64;

/// The operand of ldtilecfg: rows and bytes of a row that each tile uses.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, unused[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

}  // namespace slimrt::cpu::SLIMRT_ISA
