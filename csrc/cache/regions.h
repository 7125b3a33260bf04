// How a sequence's rows divide by age: each class of rows, a format with blocks of its own, holds a region.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/dtype.h"

namespace slimrt {

/// What a class keeps of the aged rows: a part of them, or so many blocks.
struct Share {
    double part = 0;
    int64_t blocks = 0;

    bool operator==(const Share&) const = default;
};

/// Rows are written in class 0. It keeps a sequence's first `sinks` rows and the newest, at least `recent` of
/// them. Older rows have aged: they go to classes 1, 2 ..., in whole blocks counted from the sinks, which
/// keep these `shares` of them, newest first; the last class keeps the rest, or nothing if it `forgets`. With
/// one class rows do not age.
struct Regions {
    int n_classes = 1;
    int64_t sinks = 0, recent = 0;
    std::vector<Share> shares;  // n_classes - 2 of them
    bool forgets = false;

    /// Where the region of a class begins in a sequence of `length` rows; it ends where that of the newer
    /// class begins. Never falls as the sequence grows.
    int64_t begin(int c, int64_t length) const {
        if (c == n_classes - 1) return std::min(sinks, length);
        double kept = 0;
        int64_t blocks = 0;
        for (int i = 0; i < c; ++i) kept += shares[i].part, blocks += shares[i].blocks;
        constexpr double kRounding = 1e-9;  // shares may be no binary fractions: 10 * (1 - 0.9) must give 1
        const int64_t aged = std::max<int64_t>(0, length - sinks - recent) / kBlockTokens;
        const int64_t older = int64_t(double(aged) * (1 - kept) + kRounding) - blocks;
        return std::min(sinks, length) + std::max<int64_t>(0, older) * kBlockTokens;
    }
    bool operator==(const Regions&) const = default;
};

/// Rows [begin, end) of a sequence in a class, whose block table counts from `origin`.
struct Region {
    int c = 0;
    int64_t origin = 0, begin = 0, end = 0;
};

}  // namespace slimrt
