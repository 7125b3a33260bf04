// Tables of instruction sets that differ from another only in products.
#pragma once

#include <deque>
#include <vector>

#include "kernels/cpu/isa.h"

namespace slimrt::cpu {

/// `base` under another name, with kernels of its own before those of `base`.
inline Isa isa_of(const char* name, const Isa& base, const LinearKernel* own,
                  int64_t (*busy)(uint32_t type, int64_t rounds, float* out),
                  const TileKernels* tiles = nullptr) {
    // Never destroyed: threads may still run when a process exits.
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
    isa.tiles = tiles;
    return isa;
}

}  // namespace slimrt::cpu
