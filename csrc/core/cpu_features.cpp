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
    return {.dotprod = (first & HWCAP_ASIMDDP) != 0,
            .i8mm = (second & HWCAP2_I8MM) != 0,
            .sve = (first & HWCAP_SVE) != 0};
}
#elif defined(__aarch64__) && defined(__APPLE__)
/// A system that does not know the name is of CPUs that lack the feature too.
static bool has(const char* feature) {
    int found = 0;
    size_t bytes = sizeof found;
    return ::sysctlbyname(feature, &found, &bytes, nullptr, 0) == 0 && found != 0;
}
ArmFeatures arm_features() {
    return {.dotprod = has("hw.optional.arm.FEAT_DotProd"), .i8mm = has("hw.optional.arm.FEAT_I8MM")};
}
#else
ArmFeatures arm_features() { return {}; }
#endif

}  // namespace slimrt
