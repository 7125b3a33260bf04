// Which tables this AArch64 CPU can run.
#include "core/cpu_features.h"
#include "kernels/cpu/isa.h"

namespace slimrt::cpu {

namespace neon_dot {
extern const Isa table;
}
namespace neon {
extern const Isa table;
}
namespace portable {
extern const Isa table;
}

// A table neon_i8mm would come first, and ask for SVE beside I8MM: cores that have I8MM alone (Apple, Oryon)
// compute smmla no faster than sdot.
const Isa* const* supported_isas(int* n) {
    static const Isa* isas[3];
    static const int count = [] {
        int found = 0;
        if (arm_features().dotprod) isas[found++] = &neon_dot::table;
        isas[found++] = &neon::table;
        isas[found++] = &portable::table;
        return found;
    }();
    *n = count;
    return isas;
}

bool reads_past_second_level() { return false; }

}  // namespace slimrt::cpu
