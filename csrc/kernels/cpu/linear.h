// What linear.cpp and quant.cpp define for the table of one instruction set (table.cpp).
#pragma once

#include "kernels/cpu/isa.h"

namespace slimrt::cpu::SLIMRT_ISA {

/// F32, F16, BF16 and the types of linear_types.h; of several kernels of a type the one for many tokens comes
/// first. The last entry has product nullptr.
extern const LinearKernel linear_kernels[];

int64_t busy(uint32_t type, int64_t rounds, float* out);
void unpack(uint32_t type, const void* from, int64_t n, float* to);
void narrow(uint32_t type, const float* from, int64_t n, void* to);

}  // namespace slimrt::cpu::SLIMRT_ISA
