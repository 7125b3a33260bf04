// For dispatch_x86.cpp in builds without the emulator.
#include "kernels/cpu/isa.h"

namespace slimrt::cpu {

const Isa* emulated_amx(const Isa& avx512);
const Isa* emulated_amx(const Isa&) { return nullptr; }

}  // namespace slimrt::cpu
