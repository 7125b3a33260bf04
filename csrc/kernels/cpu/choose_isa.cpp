#include <cstdlib>

#include "core/error.h"
#include "kernels/cpu/cpu_backend.h"

namespace slimrt::cpu {

std::vector<std::string> isa_names() {
    int n = 0;
    const Isa* const* isas = supported_isas(&n);
    std::vector<std::string> names;
    for (int i = 0; i < n; ++i) names.emplace_back(isas[i]->name);
    return names;
}

bool multiplies(const Isa& isa, DType type) {
    const LinearKernel* kernel = isa.linear;
    while (kernel->product && kernel->weight_type != static_cast<uint32_t>(type)) ++kernel;
    return kernel->product != nullptr;
}

const Isa& choose_isa(const std::string& asked) {
    int n = 0;
    const Isa* const* isas = supported_isas(&n);
    const char* preferred = std::getenv("SLIMRT_ISA");
    const std::string name = !asked.empty() ? asked : preferred ? preferred : "";
    if (name.empty()) return *isas[0];
    std::string known;
    for (int i = 0; i < n; ++i) {
        if (name == isas[i]->name) return *isas[i];
        known += concat(i ? ", " : "", isas[i]->name);
    }
    fail(ErrorCode::argument, "isa '", name,
         "' is not known or not supported here; this machine has: ", known);
}

}  // namespace slimrt::cpu
