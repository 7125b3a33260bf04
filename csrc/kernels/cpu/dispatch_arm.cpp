// Which tables this AArch64 CPU can run.
#include "core/cpu_features.h"
#include "kernels/cpu/isa_of.h"

namespace slimrt::cpu {

namespace neon_i8mm {
extern const LinearKernel linear_kernels[];
int64_t busy(uint32_t type, int64_t rounds, float* out);
}  // namespace neon_i8mm
namespace neon_dot {
extern const Isa table;
}
namespace neon {
extern const Isa table;
}
/// nullptr in builds without it: portable_isa.cpp, no_portable_isa.cpp.
extern const Isa* const portable_isa;

const Isa* const* supported_isas(int* n) {
    static const Isa i8mm = isa_of("neon_i8mm", neon_dot::table, neon_i8mm::linear_kernels, neon_i8mm::busy);
    static const Isa* isas[4];
    static const int count = [] {
        const ArmFeatures cpu = arm_features();
        int found = 0;
        // On other cores (Apple, Oryon) smmla is not known to be faster than sdot.
        const bool best = cpu.i8mm && cpu.neoverse;
        if (best) isas[found++] = &i8mm;
        if (cpu.dotprod) isas[found++] = &neon_dot::table;
        if (cpu.i8mm && !best) isas[found++] = &i8mm;
        isas[found++] = &neon::table;
        if (portable_isa) isas[found++] = portable_isa;
        return found;
    }();
    *n = count;
    return isas;
}

Access usual_access_of_codes() { return {Hint::t0, false, 8 << 10}; }

Access usual_access_of_rows() { return {Hint::t0, false, 10 << 10}; }

}  // namespace slimrt::cpu
