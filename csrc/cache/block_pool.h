// Rows of some layers in blocks: a pool for each layer, with the same blocks in all pools, and which blocks
// are free. It knows how many bytes a row has, not what it means or whose it is.
#pragma once

#include <span>
#include <vector>

#include "cache/cache_mode.h"
#include "cache/shared_slots.h"

namespace slimrt {

class BlockPool {
  public:
    /// A layer's backend and the format of its rows; an empty format stores nothing.
    struct Stored {
        Backend* backend;
        Format format;
    };
    /// The pool's layers are indices into this list.
    BlockPool(std::vector<Stored> layers, int64_t n_blocks);

    const Format& format(int layer) const { return layers_[layer].format; }
    size_t block_bytes(int layer) const { return layers_[layer].block_bytes; }
    size_t block_bytes() const;  // of all layers
    int n_layers() const { return int(layers_.size()); }

    int64_t n_blocks() const { return blocks_.size(); }
    int64_t n_free() const { return blocks_.n_free(); }
    /// How many sequences use a block; several may, as long as none writes to it.
    int users(int32_t block) const { return blocks_.users(block); }
    int32_t take();
    void share(int32_t block) { blocks_.share(block); }
    void drop(int32_t block) { blocks_.drop(block); }
    void copy(int32_t from, int32_t to);

    /// Views of a layer's planes for reading and writing.
    Rows rows(int layer, int plane) const;
    Slots slots(int layer, int plane, Tensor slots) const;

    /// Calls visit(backend, address, bytes) for the rows of positions [begin, end) of a block table, by
    /// layer, plane, block and head: elements, then scales. A whole block of a plane is one visit, as rows
    /// that share scales need (Plane::scale_tokens).
    template <class Visit>
    void visit_rows(std::span<const int32_t> table, int64_t begin, int64_t end, Visit visit) const;

  private:
    struct Layer : Stored {
        std::vector<size_t> plane_offset;  // bytes; of a plane inside a block
        size_t block_bytes = 0;            // of all planes
        Buffer pool;

        std::byte* plane(int32_t block, int p) const {
            return pool.data.get() + block * block_bytes + plane_offset[p];
        }
    };

    std::vector<Layer> layers_;
    SharedSlots blocks_;
};

template <class Visit>
void BlockPool::visit_rows(std::span<const int32_t> table, int64_t begin, int64_t end, Visit visit) const {
    for (const Layer& layer : layers_)
        for (size_t p = 0; p < layer.format.size(); ++p) {
            const Plane& plane = layer.format[p];
            const HeadBytes bytes =
                head_bytes(plane.type, plane.width / plane.heads, kBlockTokens, plane.scale_tokens);
            const size_t elements = bytes.elements / kBlockTokens;
            for (int64_t first = begin, n; first < end; first += n) {
                const int64_t row = first % kBlockTokens;
                n = std::min(kBlockTokens - row, end - first);
                std::byte* head = layer.plane(table[first / kBlockTokens], int(p));
                if (n == kBlockTokens) {
                    visit(*layer.backend, head, plane.block_bytes());
                    continue;
                }
                for (int h = 0; h < plane.heads; ++h, head += bytes.total()) {
                    visit(*layer.backend, head + row * elements, n * elements);
                    if (bytes.scales)
                        visit(*layer.backend, head + bytes.elements + row * bytes.scales / kBlockTokens,
                              n * bytes.scales / kBlockTokens);
                }
            }
        }
}

}  // namespace slimrt
