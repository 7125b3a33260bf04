// For dispatch_arm.cpp in builds without the portable kernels.
#include "kernels/cpu/isa.h"

namespace slimrt::cpu {

extern const Isa* const portable_isa;
const Isa* const portable_isa = nullptr;

}  // namespace slimrt::cpu
