// Means of stretches of kStretchRows rows, which stand for the values that sparse attention leaves unread
// (AttentionArgs::sparse_delta). Rows of a full stretch do not change, so their mean is summed once and not
// at every step. Forks share means; a truncated sequence gives back those of stretches that are no longer
// full. No sequence depends on them: where no mean is free, attention sums the rows again.
#pragma once

#include <span>
#include <vector>

#include "cache/cache_mode.h"
#include "cache/shared_slots.h"

namespace slimrt {

class KeptMeans {
  public:
    /// A layer's backend and the planes that have means; an empty format has none.
    struct Layer {
        Backend* backend;
        Format format;
    };
    KeptMeans() = default;
    /// Room for n means of each plane.
    KeptMeans(const std::vector<Layer>& layers, int64_t n);

    /// Extends a sequence's means to the full stretches of `length` rows; -1 where no mean is free.
    void grow(std::vector<int32_t>& means, int64_t length);
    /// Drops the means of stretches that are not within the first `length` rows.
    void cut(std::vector<int32_t>& means, int64_t length);
    void share(std::span<const int32_t> means);
    /// The means of a layer's plane.
    StretchMeans of(int layer, int plane) const;

  private:
    struct Planes {
        std::vector<StretchMeans> planes;
        Buffer sums, known;
    };

    SharedSlots slots_;
    std::vector<Planes> layers_;
};

}  // namespace slimrt
