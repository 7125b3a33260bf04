#pragma once

#include <cstdint>

namespace slimrt {

/// The features of this ARM CPU beyond baseline NEON that the system supports; all false elsewhere. x86:
/// below, and in kernels/cpu/dispatch_x86.cpp.
struct ArmFeatures {
    bool dotprod = false;   // FEAT_DotProd: sdot
    bool i8mm = false;      // FEAT_I8MM: smmla
    bool neoverse = false;  // a core whose smmla is faster than its sdot
};
ArmFeatures arm_features();

/// Whether this MIDR_EL1 (the register that identifies a core) is of a Neoverse with FEAT_I8MM.
bool is_neoverse_with_i8mm(uint64_t midr);

/// Whether this x86 CPU has AMX-BF16 and AVX512-BF16, and Linux lets this process use the tile registers,
/// which it requests. Linux refuses where the alternate signal stack of a thread is too small for them.
bool may_use_amx();
/// Whether the CPU has AVX512-BF16; AVX-VNNI (VNNI without AVX-512).
bool has_avx512_bf16();
bool has_avx_vnni();
/// Whether CPUID says that 512-bit instructions execute in two halves (Zen 4).
bool executes_512_bits_in_halves();

}  // namespace slimrt
