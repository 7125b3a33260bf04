// Which tables this x86 CPU can run.
#include "kernels/cpu/isa.h"

namespace slimrt::cpu {

namespace avx512 {
extern const Isa table;
}
namespace avx2 {
extern const Isa table;
}
namespace portable {
extern const Isa table;
}

const Isa* const* supported_isas(int* n) {
    static const Isa* isas[3];
    static const int count = [] {
        const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                              __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
        const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                                __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
        int found = 0;
        if (has_avx512) isas[found++] = &avx512::table;
        if (has_avx2) isas[found++] = &avx2::table;
        isas[found++] = &portable::table;
        return found;
    }();
    *n = count;
    return isas;
}

Access usual_access_of_codes() { return {Hint::t0, true, 16 << 10}; }

Access usual_access_of_rows() { return {__builtin_cpu_is("amd") ? Hint::nta : Hint::t0, false, 10 << 10}; }

}  // namespace slimrt::cpu
