// The instruction set amx_emulated for dispatch_x86.cpp: AMX by tiles_emulated.h.
#include "kernels/cpu/isa_of.h"

namespace slimrt::cpu {

namespace amx_emulated {
extern const LinearKernel linear_kernels[];
int64_t busy(uint32_t type, int64_t rounds, float* out);
extern const TileKernels tile_kernels;
}  // namespace amx_emulated

const Isa* emulated_amx(const Isa& avx512);
const Isa* emulated_amx(const Isa& avx512) {
    static const Isa isa = isa_of("amx_emulated", avx512, amx_emulated::linear_kernels, amx_emulated::busy,
                                  &amx_emulated::tile_kernels);
    return &isa;
}

}  // namespace slimrt::cpu
