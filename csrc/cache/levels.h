// Levels: what rows become as they age, in modes that have them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.h"

namespace slimrt {

/// A level of age: types of K and V; which part of V's columns is kept, the first ones; and which share of
/// the aged rows the level has, or how many of them. The oldest level has the rows that the others leave.
struct Level {
    DType type_k = DType::F16, type_v = DType::F16;
    double part = 1, share = 0;  // part 0: rows are forgotten
    int64_t rows = 0;            // in place of a share

    bool operator==(const Level&) const = default;
};

/// As text: levels joined by +, oldest first, each TYPE_K[/TYPE_V][@PART][*SHARE] or ...*ROWS; the first may
/// be "none", which forgets rows. A sequence's first sinks=ROWS and at least its newest recent=ROWS stay as
/// they were written. "eager": a prompt reads V as the newest level keeps it, as published low-rank caches
/// do, and not V itself. "predict": of V only what K does not predict is kept.
///     q2@0.5+q4*0.1+sinks=4
struct Levels {
    std::vector<Level> of;  // oldest first
    int64_t sinks = 0, recent = 0;
    bool eager = false, predicts = false;

    bool operator==(const Levels&) const = default;
};

/// At most 8 levels. What a text leaves out is as in `usual`, and a level's share 0.1. Throws Error{argument}
/// for an invalid text, Error{unsupported} for unknown types.
Levels parse_levels(const std::string& text, const Levels& usual);
/// Whether a text is one of levels, and not the name of a type.
bool says_levels(const std::string& text);
/// The text of levels, without what is as in `usual`.
std::string to_text(const Levels& levels, const Levels& usual);

/// How many KV heads share a latent of mode lowrank, unless a fold says otherwise: with more of them as many
/// columns hold more of V, but a query accumulates the latent of its whole group.
int default_latent_heads(int n_kv_heads);

}  // namespace slimrt
