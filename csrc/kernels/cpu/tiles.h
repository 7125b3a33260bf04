// The AMX instructions. tiles_emulated.h has the same interface.
#pragma once

#include "kernels/cpu/tile_shapes.h"

namespace slimrt::cpu::SLIMRT_ISA {

/// The tile registers of this thread. shape() configures and zeroes them; release() frees the state, so that
/// context switches need not save it.
struct Tiles {
    static void shape(const TileShapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes)); }
    static void release() { asm volatile("tilerelease"); }

    template <int to>
    static void zero() {
        asm volatile("tilezero %%tmm%c0" : : "i"(to));
    }
    /// Rows are `stride` bytes apart.
    template <int to>
    static void load(const void* from, size_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(to) : "memory");
    }
    template <int from>
    static void store(void* to, size_t stride) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(from) : "memory");
    }
    /// f32 to[m][n] += bf16 a[m][2 p] * b[p][2 n] + a[m][2 p + 1] * b[p][2 n + 1] over all rows p of b.
    template <int to, int a, int b>
    static void multiply() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(to), "i"(a), "i"(b));
    }
    /// int32 to[m][n] += the sum of the four uint8 a[m][4 p + i] * int8 b[p][4 n + i] over all rows p of b.
    template <int to, int a, int b>
    static void multiply_codes() {
        asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(to), "i"(a), "i"(b));
    }
};

}  // namespace slimrt::cpu::SLIMRT_ISA
