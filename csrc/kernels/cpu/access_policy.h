// How the CPU backend prefetches: the default, what was measured on this machine, or what SLIMRT_ACCESS says.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "kernels/cpu/access.h"

namespace slimrt::cpu {

/// For products of one token with each type of weight, and for cached rows that are read head by head.
struct AccessPolicy {
    std::array<Access, kTypeNumbers> weights;  // by DType
    Access float_rows, rows;                   // float_rows: F32, F16, BF16; rows: quantised

    /// By the name of a type of weight, "float_rows" or "rows"; nullptr: there is no such kind.
    Access* find(const std::string& kind);
};

/// The kinds of an instruction set (see choose_isa()): the types that weights are held in, then "float_rows"
/// and "rows".
std::vector<std::string> access_kinds(const std::string& isa = "");

/// The defaults: what was fastest on most machines it was measured on.
AccessPolicy usual_access();

/// "usual", or HINT[:BYTES][:several] for every kind, or KIND=HINT... for one, separated by commas. Kinds
/// that are not named stay as in `policy`. Throws Error{argument}, which lists the hints and kinds.
AccessPolicy parse_access(const std::string& text, AccessPolicy policy = usual_access());
std::string to_text(const Access& access);
std::string to_text(const AccessPolicy& policy);  // KIND=..., separated by commas

/// What backends opened from now on use, unless SLIMRT_ACCESS is set.
void set_access(const AccessPolicy& policy);
/// Throws Error{argument} for a SLIMRT_ACCESS that parse_access() refuses.
AccessPolicy chosen_access();

}  // namespace slimrt::cpu
