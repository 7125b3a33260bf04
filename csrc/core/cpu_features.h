#pragma once

namespace slimrt {

/// What this ARM CPU and its system offer beyond NEON, which every AArch64 CPU has; all false elsewhere. What
/// x86 has is asked in kernels/cpu/dispatch_x86.cpp.
struct ArmFeatures {
    bool dotprod = false;  // FEAT_DotProd: sdot
    bool i8mm = false;     // FEAT_I8MM: smmla
    bool sve = false;
};
ArmFeatures arm_features();

}  // namespace slimrt
