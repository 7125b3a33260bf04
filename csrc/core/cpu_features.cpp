#include "core/cpu_features.h"

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>

#include <cstddef>
#elif defined(__x86_64__)
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace slimrt {

bool is_neoverse_with_i8mm(uint64_t midr) {
    constexpr uint64_t arm = 0x41, microsoft = 0x6d;  // Cobalt 100 is an N2
    const uint64_t implementer = midr >> 24 & 0xff, part = midr >> 4 & 0xfff;
    if (implementer != arm && implementer != microsoft) return false;
    constexpr uint64_t v1 = 0xd40, n2 = 0xd49, v2 = 0xd4f, v3ae = 0xd83, v3 = 0xd84, n3 = 0xd8e;
    return part == v1 || part == n2 || part == v2 || part == v3ae || part == v3 || part == n3;
}

#if defined(__aarch64__) && defined(__linux__)
/// Linux emulates reading the register where HWCAP_CPUID is set.
static uint64_t main_id(unsigned long features) {
    uint64_t midr = 0;
    if (features & HWCAP_CPUID) asm("mrs %0, midr_el1" : "=r"(midr));
    return midr;
}
ArmFeatures arm_features() {
    const unsigned long first = ::getauxval(AT_HWCAP), second = ::getauxval(AT_HWCAP2);
    return {.dotprod = (first & HWCAP_ASIMDDP) != 0,
            .i8mm = (second & HWCAP2_I8MM) != 0,
            .neoverse = is_neoverse_with_i8mm(main_id(first))};
}
#elif defined(__aarch64__) && defined(__APPLE__)
/// Systems that do not know the name run on CPUs without the feature.
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

#ifdef __x86_64__
/// A bit of EAX of CPUID leaf 7, subleaf 1.
static bool has_feature(int bit) {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> bit & 1);
}
bool has_avx512_bf16() { return has_feature(5); }
bool has_avx_vnni() { return has_feature(4); }
bool executes_512_bits_in_halves() {
    constexpr unsigned widths = 0x8000001a, of_256 = 1 << 2,
                       of_512 = 1 << 3;  // AMD64 manual, volume 3, E.4.17
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(widths, &a, &b, &c, &d) && (a & (of_256 | of_512)) == of_256;
}
#else
bool has_avx512_bf16() { return false; }
bool has_avx_vnni() { return false; }
bool executes_512_bits_in_halves() { return false; }
#endif

#if defined(__x86_64__) && defined(__linux__)
bool may_use_amx() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    const bool there = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) && (d >> 24 & 1);
    constexpr long ask_for = 0x1023, tiles = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA
    return there && has_avx512_bf16() && ::syscall(SYS_arch_prctl, ask_for, tiles) == 0;
}
#else
bool may_use_amx() { return false; }
#endif

}  // namespace slimrt
