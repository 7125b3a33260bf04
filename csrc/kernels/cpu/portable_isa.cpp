// The portable kernels, for dispatch_arm.cpp.
#include "kernels/cpu/isa.h"

namespace slimrt::cpu {

namespace portable {
extern const Isa table;
}
extern const Isa* const portable_isa;
const Isa* const portable_isa = &portable::table;

}  // namespace slimrt::cpu
