// The table of machines without kernels of their own.
#include "kernels/cpu/isa.h"

namespace slimrt::cpu {

namespace portable {
extern const Isa table;
}

const Isa* const* supported_isas(int* n) {
    static const Isa* const isas[] = {&portable::table};
    *n = 1;
    return isas;
}

Access usual_access_of_codes() { return {Hint::t0, false, 8 << 10}; }

Access usual_access_of_rows() { return {Hint::t0, false, 10 << 10}; }

}  // namespace slimrt::cpu
