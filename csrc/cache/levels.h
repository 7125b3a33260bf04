// What rows become as they age, in modes whose rows do.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.h"

namespace slimrt {

/// Rows of some age: types of K and V, the first columns of V that are kept, as a part of all, and how large
/// a share of the rows that have aged it has, or how many of them (of the oldest level: what others leave).
struct Level {
    DType type_k = DType::F16, type_v = DType::F16;
    double part = 1, share = 0;  // part 0: nothing is kept, and the row is forgotten
    int64_t rows = 0;            // instead of a share

    bool operator==(const Level&) const = default;
};

/// As text: levels with + between, oldest first, each TYPE_K[/TYPE_V][@PART][*SHARE] or ...*ROWS, the first
/// perhaps "none": rows are forgotten; what stays as it is written, sinks=ROWS of a text's first and at least
/// recent=ROWS of its newest; "eager" if a prompt is to read V as the newest level keeps it, as published
/// low-rank caches do, and not V itself; and "predict" if of V only what K does not tell is to be kept:
///     q2@0.5+q4*0.1+sinks=4
struct Levels {
    std::vector<Level> of;  // oldest first
    int64_t sinks = 0, recent = 0;
    bool eager = false, predicts = false;

    bool operator==(const Levels&) const = default;
};

/// At most 8 levels; what a text leaves open is as in `usual`, and the share of a level 0.1. Throws
/// Error{argument} for what is no such text, Error{unsupported} for unknown types.
Levels parse_levels(const std::string& text, const Levels& usual);
/// Whether a text says levels, and not the name of a type.
bool says_levels(const std::string& text);
/// Less what is as in `usual`.
std::string to_text(const Levels& levels, const Levels& usual);

/// How many KV heads share a latent of mode lowrank, unless a fold says otherwise: more tell more of V in as
/// many columns, but a query accumulates the latent of its whole group.
int usual_latent_heads(int n_kv_heads);

}  // namespace slimrt
