#pragma once

#include <cstdint>

namespace slimrt {

/// What this ARM CPU and its system offer beyond NEON, which every AArch64 CPU has; all false elsewhere. x86:
/// below and in kernels/cpu/dispatch_x86.cpp.
struct ArmFeatures {
    bool dotprod = false;   // FEAT_DotProd: sdot
    bool i8mm = false;      // FEAT_I8MM: smmla
    bool neoverse = false;  // one of those that compute smmla faster than sdot
};
ArmFeatures arm_features();

/// Whether this MIDR_EL1, by which a core says what it is, is of a Neoverse that has FEAT_I8MM.
bool is_neoverse_with_i8mm(uint64_t midr);

/// Whether this x86 CPU has AMX for bf16, and AVX-512 for it, and its system lets this process use the tiles,
/// which it is asked for: Linux says no where a thread's stack for signals is too small for what they hold.
bool may_use_amx();
/// Whether it has AVX-512 for bf16, and VNNI without AVX-512.
bool has_avx512_bf16();
bool has_avx_vnni();
/// Whether it says that its instructions of 512 bits, if it has any, are executed in two halves (Zen 4).
bool executes_512_bits_in_halves();

}  // namespace slimrt
