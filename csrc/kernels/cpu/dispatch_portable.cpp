// Machines without kernels of their own.
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

bool reads_past_second_level() { return false; }

}  // namespace slimrt::cpu
