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
ArmFeatures arm_features() { return {.dotprod = (::getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0}; }
#elif defined(__aarch64__) && defined(__APPLE__)
ArmFeatures arm_features() {
    int has = 0;  // a system that does not know the name is of CPUs that lack the feature too
    size_t bytes = sizeof has;
    return {.dotprod =
                ::sysctlbyname("hw.optional.arm.FEAT_DotProd", &has, &bytes, nullptr, 0) == 0 && has != 0};
}
#else
ArmFeatures arm_features() { return {}; }
#endif

}  // namespace slimrt
