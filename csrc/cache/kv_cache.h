// The rows of all layers, and the sequences that own them.
//
// Layers that keep rows of the same positions are a group: those that attend to the whole context, or those
// that attend to the last `window` positions. A group has a pool of blocks, and each sequence a block table
// in it: entry i is the block of the positions [i * kBlockTokens, (i + 1) * kBlockTokens), or -1 where the
// rows were given back. Forked sequences share blocks and copy one before writing to it.
//
// Behind a window no row is read again, unless the sequence is truncated. So a sequence keeps as many blocks
// as a window and one step may need, and gives the oldest one back when it needs another: what at most
// longest_step tokens have appended can always be undone.
#pragma once

#include <map>
#include <span>
#include <utility>
#include <vector>

#include "cache/block_pool.h"

namespace slimrt {

/// What a layer keeps: of a token a row of this format, for the next `window` positions (0: all).
struct LayerRows {
    Format format;
    int64_t window = 0;
};

class KvCache {
  public:
    static constexpr int kBlockTokens = slimrt::kBlockTokens;
    /// Sequences, and by how many tokens each.
    using Growth = std::span<const std::pair<int, int64_t>>;

    /// Room for n_seqs sequences of n_ctx tokens that grow by at most longest_step tokens at once.
    KvCache(Backend& backend, const std::vector<LayerRows>& layers, int64_t n_ctx, int n_seqs,
            int64_t longest_step);

    int64_t n_ctx() const { return n_ctx_; }
    size_t bytes_per_token(int layer) const { return pool(layer).row_bytes(where_[layer].index); }
    const Format& format(int layer) const { return pool(layer).format(where_[layer].index); }
    int64_t window(int layer) const { return groups_[group_of(layer)].window; }
    /// The most rows that a layer keeps of a sequence.
    int64_t max_rows(int layer) const;

    // Sequences, by handle. An unknown handle throws Error{argument}.
    int create();
    void release(int sequence);
    int fork(int sequence);
    int64_t length(int sequence) const { return find(sequence).length; }
    /// Throws Error{argument} for a length it has not, or to which can_truncate() is false.
    void truncate(int sequence, int64_t length);
    /// Whether every row that a window of a text of this length looks back to is still there; to 0 always.
    bool can_truncate(int sequence, int64_t length) const;

    int n_groups() const { return int(groups_.size()); }
    int group_of(int layer) const { return where_[layer].group; }
    const int32_t* table(int sequence, int group) const;
    /// The first row that tokens after `length` ones look back to.
    int64_t begin(int group, int64_t length) const;

    /// Throws Error{context_overflow} unless every sequence can grow by its count; changes nothing.
    void require_room(Growth growth) const;
    /// Makes the next n rows of a sequence writable, n at most longest_step. Its length grows at commit();
    /// until then truncate() to its length gives them up, before anything else is done with it.
    void reserve(int sequence, int64_t n);
    /// Appends the slots of these rows in the layers of a group.
    void add_slots(int sequence, int group, int64_t n, std::vector<int32_t>& slots) const;
    void commit(int sequence, int64_t n) { find(sequence).length += n; }

    /// Views of a layer's planes for reading and writing.
    std::vector<Rows> rows(int layer) const;
    Slots slots(int layer, int plane, Tensor slots) const;

    /// The rows of a sequence that later tokens may read, as bytes, group after group (see
    /// BlockPool::visit_rows); and back into a new sequence.
    std::vector<std::byte> save(int sequence) const;
    int restore(std::span<const std::byte> bytes, int64_t length);

    /// Lengthens a sequence to `length` tokens with copies of its own blocks, in turn: a long context to
    /// measure with, that nobody waits for. Throws Error{argument} unless both lengths are whole blocks, at
    /// least one.
    void tile(int sequence, int64_t length);

  private:
    struct Group {
        int64_t window;
        int64_t max_blocks;  // of a sequence
        BlockPool pool;
    };
    struct Place {
        int group, index;  // of a layer: in its group
    };
    /// What a sequence has in a group.
    struct Kept {
        std::vector<int32_t> table;
        int64_t first = 0;  // position of the oldest row

        int64_t front() const { return first / kBlockTokens; }  // its block
        int64_t n_blocks() const { return int64_t(table.size()) - front(); }
    };
    struct Sequence {
        std::vector<Kept> groups;
        int64_t length = 0;
    };

    const BlockPool& pool(int layer) const { return groups_[where_[layer].group].pool; }
    Sequence& find(int sequence);
    const Sequence& find(int sequence) const;
    int64_t blocks_taken(int group, Growth growth) const;
    void require_free(const Group& group, int64_t blocks) const;
    static void give_back(Group& group, Kept& kept, int64_t front);

    Backend& backend_;
    int64_t n_ctx_;
    std::vector<Group> groups_;
    std::vector<Place> where_;  // each layer
    std::map<int, Sequence> sequences_;
    int next_ = 0;
};

}  // namespace slimrt
