// tiles.h for tests on processors without AMX.
#pragma once

#include <string.h>

#include "kernels/cpu/tile_shapes.h"

namespace slimrt::cpu::SLIMRT_ISA {

struct TileState {
    TileShapes shapes;
    alignas(64) uint8_t tiles[8][tile_rows * tile_bytes];
};
inline constinit thread_local TileState state = {};  // one for all units, as there is one processor

struct Tiles {
    static void shape(const TileShapes& shapes) {
        memset(state.tiles, 0, sizeof state.tiles);
        state.shapes = shapes;
    }
    static void release() { state.shapes.palette = 0; }

    template <int to>
    static void zero() {
        memset(state.tiles[to], 0, sizeof state.tiles[to]);
    }
    template <int to>
    static void load(const void* from, size_t stride) {
        zero<to>();
        for (int r = 0; r < rows(to); ++r)
            memcpy(state.tiles[to] + r * tile_bytes, static_cast<const uint8_t*>(from) + r * stride,
                   bytes(to));
    }
    template <int from>
    static void store(void* to, size_t stride) {
        for (int r = 0; r < rows(from); ++r)
            memcpy(static_cast<uint8_t*>(to) + r * stride, state.tiles[from] + r * tile_bytes, bytes(from));
    }
    template <int to, int a, int b>
    static void multiply() {
        for (int m = 0; m < rows(a); ++m) {
            for (size_t n = 0; n < bytes(b) / 4; ++n) {
                float* const sum = reinterpret_cast<float*>(state.tiles[to] + m * tile_bytes) + n;
                for (int p = 0; p < rows(b); ++p) {
                    for (int i = 0; i < 2; ++i) *sum += at(a, m, 2 * p + i) * at(b, p, 2 * int(n) + i);
                }
            }
        }
    }

    template <int to, int a, int b>
    static void multiply_codes() {
        for (int m = 0; m < rows(a); ++m) {
            for (size_t n = 0; n < bytes(b) / 4; ++n) {
                int32_t sum;
                uint8_t* const at = state.tiles[to] + m * tile_bytes + 4 * n;
                memcpy(&sum, at, sizeof sum);
                for (int p = 0; p < rows(b); ++p) {
                    for (int i = 0; i < 4; ++i)
                        sum += state.tiles[a][m * tile_bytes + 4 * p + i] *
                               static_cast<int8_t>(state.tiles[b][p * tile_bytes + 4 * n + i]);
                }
                memcpy(at, &sum, sizeof sum);
            }
        }
    }

  private:
    /// 0 if the tile was not configured, or was released: operations on it then change nothing, and a test
    /// fails.
    static int rows(int tile) { return state.shapes.palette == 1 ? state.shapes.rows[tile] : 0; }
    static size_t bytes(int tile) { return state.shapes.row_bytes[tile]; }
    static float at(int tile, int row, int column) {
        uint32_t bits = 0;
        memcpy(reinterpret_cast<uint8_t*>(&bits) + 2, state.tiles[tile] + row * tile_bytes + 2 * column, 2);
        float value;
        memcpy(&value, &bits, sizeof value);
        return value;
    }
};
}  // namespace slimrt::cpu::SLIMRT_ISA
