// An instruction set that has only products of its own.
#pragma once

#include <vector>

#include "kernels/cpu/isa.h"

namespace slimrt::cpu {

/// `base` with another name, whose own products come first. What it lists is kept for good.
inline Isa isa_of(const char* name, const Isa& base, const LinearKernel* own,
                  int64_t (*busy)(uint32_t type, int64_t rounds, float* out)) {
    auto* const linear = new std::vector<LinearKernel>;
    for (const LinearKernel* const from : {own, base.linear}) {
        for (const LinearKernel* kernel = from; kernel->product; ++kernel) linear->push_back(*kernel);
    }
    linear->push_back({});
    Isa isa = base;
    isa.name = name;
    isa.linear = linear->data();
    isa.busy = busy;
    return isa;
}

}  // namespace slimrt::cpu
