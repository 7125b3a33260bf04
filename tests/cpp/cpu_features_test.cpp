// Which cores count as a Neoverse with fast products of matrices, by their MIDR_EL1 as Linux shows it.
#include "core/cpu_features.h"

#include <cstdio>

int main() {
    const struct {
        const char* name;
        uint64_t midr;
        bool wanted;
    } cores[] = {
        {"Neoverse V1 (Graviton 3)", 0x411fd401, true},
        {"Neoverse N2", 0x410fd490, true},
        {"Neoverse V2 (Graviton 4)", 0x410fd4f1, true},
        {"Neoverse V3", 0x410fd840, true},
        {"Neoverse N3", 0x410fd8e0, true},
        {"Cobalt 100", 0x6d0fd490, true},
        {"Neoverse N1", 0x413fd0c1, false},
        {"Cortex-A76", 0x414fd0b1, false},
        {"Cortex-A710", 0x412fd470, false},
        {"Cortex-X2", 0x411fd480, false},
        {"Apple M2, P core", 0x611f0330, false},
        {"Oryon", 0x512f0011, false},
        {"another maker's 0xd40", 0x480fd400, false},
        {"not told", 0, false},
    };
    int failed = 0;
    for (const auto& core : cores) {
        if (slimrt::is_neoverse_with_i8mm(core.midr) == core.wanted) continue;
        std::fprintf(stderr, "cpu_features_test: %s\n", core.name);
        failed = 1;
    }
    return failed;
}
