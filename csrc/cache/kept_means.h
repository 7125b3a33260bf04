// Means of whole stretches of rows, for attention that spares some (AttentionArgs::sparse_delta): rows of a
// whole stretch stay as they are, so that their mean is summed once and not at every step. It belongs to the
// sequences that have all of these rows, and lies beside the blocks: forks share it, and one that is cut
// gives it back, whatever becomes of the blocks. No sequence depends on it: where none is free, as where
// many forks share their blocks, attention sums.
#pragma once

#include <span>
#include <vector>

#include "cache/cache_mode.h"
#include "cache/shared_slots.h"

namespace slimrt {

class KeptMeans {
  public:
    /// The planes of a layer, of which there are means, and on which backend; those of an empty format: none.
    struct Layer {
        Backend* backend;
        Format format;
    };
    KeptMeans() = default;
    /// n of each plane.
    KeptMeans(const std::vector<Layer>& layers, int64_t n);

    /// One for each whole stretch of a sequence of `length` rows, as far as there are free ones, or -1.
    void grow(std::vector<int32_t>& means, int64_t length);
    /// Those alone that a sequence still has which kept `length` of these rows.
    void cut(std::vector<int32_t>& means, int64_t length);
    void share(std::span<const int32_t> means);
    /// Of a layer's plane.
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
