// Which access to memory is fastest on this machine: tried on the kernels themselves.
#pragma once

#include <span>
#include <string>

#include "kernels/cpu/access_policy.h"

namespace slimrt::bench {

/// What was found of one kind. gain: the usual access takes so many times as long (median; 1 where it was
/// kept). read_share: of the rate at which the same memory is merely read, that products reach with `best`; 0
/// of rows.
struct Tuned {
    std::string kind;
    cpu::Access best;
    double gain = 1, read_share = 0;
};

/// Tries ways to access memory with a kind, see cpu::access_kinds(), turn by turn on memory that no cache
/// holds, for about so many seconds (0: shows that it works; the figures mean nothing). The usual one is kept
/// unless another is 5 % faster, and is so again when the two are tried against each other, where it must be
/// faster in three turns of four. isa "": the best. Throws Error{argument, wont_fit}.
Tuned tune(const std::string& kind, const std::string& isa, int n_threads, double seconds);

/// How many times as long products with some of these bytes, from everywhere, take where they are as in huge
/// pages: CPU time, the median of turns of each part. 1 where there are too few to tell. Throws
/// Error{wont_fit}.
double huge_page_gain(std::span<const std::byte> bytes, int n_threads);

}  // namespace slimrt::bench
