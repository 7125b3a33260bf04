#include "core/cpu_features.h"

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>

#include <cstddef>
#endif

namespace slimrt {

#if defined(__aarch64__) && defined(__linux__)
ArmFeatures arm_features() {
    const unsigned long first = ::getauxval(AT_HWCAP), second = ::getauxval(AT_HWCAP2);
    return {(first & HWCAP_ASIMDDP) != 0, (second & HWCAP2_I8MM) != 0, (first & HWCAP_SVE) != 0};
}
#elif defined(__aarch64__) && defined(__APPLE__)
namespace {
/// False where the system does not know the name: such a system's CPUs lack the feature too.
bool has(const char* name) {
    int value = 0;
    size_t bytes = sizeof value;
    return ::sysctlbyname(name, &value, &bytes, nullptr, 0) == 0 && value != 0;
}
}  // namespace

ArmFeatures arm_features() {
    return {has("hw.optional.arm.FEAT_DotProd"), has("hw.optional.arm.FEAT_I8MM"), false};
}
#else
ArmFeatures arm_features() { return {}; }
#endif

}  // namespace slimrt
