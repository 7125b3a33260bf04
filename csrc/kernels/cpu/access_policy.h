// Which access to memory the CPU backend follows: the usual one, a measured one, or what SLIMRT_ACCESS says.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "kernels/cpu/access.h"

namespace slimrt::cpu {

/// Of products of one token with each type of weight, and of cached rows that are read by their heads.
struct AccessPolicy {
    std::array<Access, kTypeNumbers> weights;  // by the number of a type
    Access float_rows, rows;                   // the latter: of codes, a head's with scales

    /// By the name of a type of weight, "float_rows" or "rows"; nullptr: there is none.
    Access* find(const std::string& kind);
};

/// Of what there is with an instruction set (see choose_isa()): types that models are held in, then
/// "float_rows" and "rows".
std::vector<std::string> access_kinds(const std::string& isa = "");

/// What was best on most machines it was measured on.
AccessPolicy usual_access();

/// "usual"; or HINT[:BYTES][:several] with a Hint by its name, for every kind or as KIND=... for one, with
/// commas between: what is not named stays as in `policy`. Throws Error{argument}, which lists them.
AccessPolicy parse_access(const std::string& text, AccessPolicy policy = usual_access());
std::string to_text(const Access& access);
std::string to_text(const AccessPolicy& policy);  // kind by kind

/// What backends opened from now on follow, unless SLIMRT_ACCESS says it.
void set_access(const AccessPolicy& policy);
/// Throws Error{argument} for a SLIMRT_ACCESS that parse_access() does not know.
AccessPolicy chosen_access();

}  // namespace slimrt::cpu
