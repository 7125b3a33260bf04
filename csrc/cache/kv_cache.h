// Rows of all layers in blocks, and the sequences that own them. It knows how many bytes a row has, not what
// a row means. A block holds kBlockTokens consecutive tokens of a sequence in every layer; a block table maps
// a sequence's positions to blocks; forked sequences share full blocks and copy one before writing to it.
#pragma once

#include <map>
#include <span>
#include <vector>

#include "cache/cache_mode.h"

namespace slimrt {

class KvCache {
  public:
    static constexpr int kBlockTokens = slimrt::kBlockTokens;

    /// formats[layer]; room for n_seqs sequences of n_ctx tokens.
    KvCache(Backend& backend, std::vector<Format> formats, int64_t n_ctx, int n_seqs);

    int64_t n_ctx() const { return n_ctx_; }
    size_t bytes_per_token(int layer) const { return layers_[layer].row_bytes; }
    const Format& format(int layer) const { return layers_[layer].format; }

    // Sequences, by handle. An unknown handle throws Error{argument}.
    int create();
    void release(int sequence);
    int fork(int sequence);
    void truncate(int sequence, int64_t length);
    int64_t length(int sequence) const;

    // Layers of a group keep rows of the same positions, with block tables of their own.
    int n_groups() const { return 1; }
    int group_of(int) const { return 0; }
    const int32_t* table(int sequence, int group) const;

    /// Throws Error{context_overflow} unless every sequence can grow by its count; changes nothing.
    void require_room(std::span<const std::pair<int, int64_t>> growth) const;
    /// Makes the next n rows of a sequence writable. Its length grows at commit().
    void reserve(int sequence, int64_t n);
    /// Appends the slots of these rows in the layers of a group.
    void add_slots(int sequence, int group, int64_t n, std::vector<int32_t>& slots) const;
    void commit(int sequence, int64_t n);

    /// Views of a layer's planes for reading and writing.
    std::vector<Rows> rows(int layer) const;
    Slots slots(int layer, int plane, Tensor slots) const;

    /// A sequence's rows as bytes, layer after layer, plane after plane, block after block, head after head;
    /// and back into a new sequence.
    std::vector<std::byte> save(int sequence) const;
    int restore(std::span<const std::byte> bytes, int64_t length);

    /// Lengthens a sequence to `length` tokens with copies of its own blocks, in turn: a long context to
    /// measure with, that nobody waits for. Throws Error{argument} unless both lengths are whole blocks, at
    /// least one.
    void tile(int sequence, int64_t length);

  private:
    struct Layer {
        Format format;
        std::vector<size_t> plane_offset;  // bytes; of a plane inside a block
        size_t row_bytes = 0;              // of all planes
        Buffer pool;
    };
    struct Sequence {
        std::vector<int32_t> blocks;
        int64_t length = 0;
    };

    Rows plane(int layer, int plane) const;
    Sequence& find(int sequence);
    const Sequence& find(int sequence) const;
    int32_t take_block();
    void drop_block(int32_t block);
    void copy_block(int32_t from, int32_t to);
    template <class Visit>
    void visit_rows(const Sequence& s, Visit visit) const;

    Backend& backend_;
    int64_t n_ctx_;
    std::vector<Layer> layers_;
    std::vector<int32_t> users_;  // sequences sharing each block
    std::vector<int32_t> free_;
    std::map<int, Sequence> sequences_;
    int next_ = 0;
};

}  // namespace slimrt
