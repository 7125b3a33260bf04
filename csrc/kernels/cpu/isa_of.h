// An instruction set that has only products of its own.
#pragma once

#include <deque>
#include <vector>

#include "kernels/cpu/isa.h"

namespace slimrt::cpu {

/// `base` with another name, whose own products come first.
inline Isa isa_of(const char* name, const Isa& base, const LinearKernel* own,
                  int64_t (*busy)(uint32_t type, int64_t rounds, float* out)) {
    // Never destroyed: threads may be at work when a process ends.
    static auto& lists = *new std::deque<std::vector<LinearKernel>>;
    std::vector<LinearKernel>& linear = lists.emplace_back();
    for (const LinearKernel* const from : {own, base.linear}) {
        for (const LinearKernel* kernel = from; kernel->product; ++kernel) linear.push_back(*kernel);
    }
    linear.push_back({});
    Isa isa = base;
    isa.name = name;
    isa.linear = linear.data();
    isa.busy = busy;
    return isa;
}

}  // namespace slimrt::cpu
