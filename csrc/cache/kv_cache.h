// The rows of all layers, and the sequences that own them.
//
// Layers that keep rows of the same positions are a group: those that attend to the whole context, or those
// that attend to the last `window` positions, and whose rows age alike (Regions). A group has a pool of
// blocks for each class of rows, and each sequence a block table in it: entry i is the block of the positions
// origin + [i * kBlockTokens, (i + 1) * kBlockTokens), or -1 where no rows of that class are. The origin is
// 0, or, of older classes, the number of sinks. Forked sequences share blocks and copy one before writing to
// it.
//
// Behind a window no row is read again, unless the sequence is truncated. So a sequence keeps as many blocks
// as a window and one step may need, and gives the oldest one back when it needs another: what at most
// longest_step tokens have appended can always be undone.
//
// Rows that age go to the next class after the append that made them old (settle()), and what is undone
// before that is as it was. A long append never has all of its rows in class 0: it is computed layer by layer
// over DenseRows, of which each layer's rows go where they belong (place()).
#pragma once

#include <functional>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "cache/block_pool.h"
#include "cache/kept_means.h"

namespace slimrt {

/// What a layer keeps, and on which backend: of a token a row, for the next `window` positions (0: all), in
/// the format of each class of rows in turn. Without rows of its own, of no format.
struct LayerRows {
    Backend* backend;
    std::vector<Format> formats;
    int64_t window = 0;
    Regions regions;
    bool spared = false;  // attention passes over some, for which means are kept where all rows stay
};

/// How rows of a layer change their class: CacheMode::recode().
using Recode = std::function<void(int layer, const Recoding&)>;

/// At most how many tokens one step appends to a sequence, and how many if its rows are to lie in class 0.
struct StepLimits {
    int64_t longest, stored;
};

/// The blocks that so many tokens take from the first row of one on.
inline int64_t blocks_for(int64_t tokens) { return (tokens + kBlockTokens - 1) / kBlockTokens; }

/// The most blocks that so many neighbouring rows lie in.
inline int64_t blocks_across(int64_t rows) { return (rows + kBlockTokens - 2) / kBlockTokens + 1; }

class KvCache {
  public:
    static constexpr int kBlockTokens = slimrt::kBlockTokens;
    /// Sequences, and by how many tokens each.
    using Growth = std::span<const std::pair<int, int64_t>>;

    /// Room for cache_tokens tokens, at least n_ctx, of all sequences together, of which n_seqs may grow at
    /// once; 0: for n_seqs sequences of n_ctx tokens.
    KvCache(const std::vector<LayerRows>& layers, int64_t n_ctx, int n_seqs, int64_t cache_tokens,
            StepLimits limits, Recode recode = {});

    int64_t n_ctx() const { return n_ctx_; }
    /// What a token leaves behind in the end.
    size_t bytes_per_token(int layer) const;
    /// Of the rows that a layer keeps of a text, scales included: less than the blocks in which they lie.
    size_t bytes_held(int layer, int64_t length) const;
    int n_classes(int layer) const { return groups_[group_of(layer)].regions.n_classes; }
    const Format& format(int layer, int c = 0) const { return pool(layer, c).format(where_[layer].index); }
    int64_t window(int layer) const { return groups_[group_of(layer)].window; }
    const Regions& regions(int layer) const { return groups_[group_of(layer)].regions; }
    /// The most rows that a layer keeps of a sequence.
    int64_t max_rows(int layer) const;

    // Sequences, by handle. An unknown handle throws Error{argument}.
    int create();
    void release(int sequence);
    int fork(int sequence);
    /// A fork that lacks the rows between its first and its last blocks, so many of each. Its length is that
    /// of what it has; tokens appended to it follow the others at the positions that they had in the whole
    /// sequence. Throws Error{argument} where nothing is between them, Error{unsupported} where layers have a
    /// window, or rows that age.
    int thin(int sequence, int64_t first, int64_t last);
    /// Tokens whose rows it lacks before those of its last blocks.
    int64_t skipped(int sequence) const { return find(sequence).skipped; }
    int64_t length(int sequence) const { return find(sequence).length; }
    /// Throws Error{argument} for a length it has not, or to which can_truncate() is false.
    void truncate(int sequence, int64_t length);
    /// Whether every row that a text of this length reads is still there, not behind a window or forgotten;
    /// to 0 always.
    bool can_truncate(int sequence, int64_t length) const;

    int n_groups() const { return int(groups_.size()); }
    int group_of(int layer) const { return where_[layer].group; }
    const int32_t* table(int sequence, int group, int c = 0) const;
    /// Of its first stretches, as AttentionSequence has them.
    std::span<const int32_t> means(int sequence, int group) const {
        return find(sequence).groups[group][0].means;
    }
    /// The first row that tokens after `length` ones look back to.
    int64_t begin(int group, int64_t length) const;
    /// Where a sequence's rows are, oldest first; the last is the newest rows. In number and classes the same
    /// for all sequences: some may be empty.
    std::vector<Region> regions_of(int sequence, int group) const;

    /// Throws Error{context_overflow} unless every sequence can grow by its count; changes nothing.
    void require_room(Growth growth) const;
    /// Whether that would not throw.
    bool has_room(Growth growth) const;
    /// The pool of which the smallest share is free now, and a sequence's blocks in it: all, and those that
    /// no other shares.
    const BlockPool& scarcest() const { return pool_of(scarcest_class()); }
    std::pair<int64_t, int64_t> blocks(int sequence) const;
    /// Makes the next n rows of a sequence writable, n at most StepLimits::longest. Its length grows at
    /// commit(); until then truncate() to its length gives them up, before anything else is done with it.
    void reserve(int sequence, int64_t n);
    /// Appends the slots of these rows in the layers of a group; none where place() will put them.
    void add_slots(int sequence, int group, int64_t n, std::vector<int32_t>& slots) const;
    /// Rows of a layer that were reserved and have no slots: from dense rows of all positions.
    void place(int sequence, int layer, const DenseRows& dense);
    void commit(int sequence, int64_t n) { find(sequence).length += n; }
    /// Moves rows that have aged to their classes. To be called after an append, which it ends.
    void settle(int sequence);
    /// Lets each layer move some rows that are nobody's, to count on a dry backend what it takes.
    void rehearse();

    /// Views of a layer's planes for reading and writing.
    std::vector<Rows> rows(int layer, int c = 0) const;
    Slots slots(int layer, int plane, Tensor slots) const { return this->slots(layer, 0, plane, slots); }

    /// The rows of a sequence, from those of a token on, that later tokens may read, as bytes, group after
    /// group: where its regions end, if there are several, and region after region their rows (see
    /// BlockPool::visit_rows). Throws Error{argument} unless `from` is a whole block of it, and beyond 0
    /// Error{unsupported} where what a text keeps of its beginning changes as it grows.
    std::vector<std::byte> save(int sequence, int64_t from) const;
    /// Back to the end of a sequence of `from` tokens, which then has `length`. Throws Error{format},
    /// Error{argument} for another sequence, and Error{context_overflow} without blocks for its rows: of a
    /// text that was cut more have aged than of any that grows to its length.
    void restore(int sequence, std::span<const std::byte> bytes, int64_t from, int64_t length);

    /// Lengthens a sequence to `length` tokens with copies of its own blocks, in turn: a long context to
    /// measure with, that nobody waits for. Throws Error{argument} unless both lengths are whole blocks, at
    /// least one.
    void tile(int sequence, int64_t length);

  private:
    struct Class {
        int64_t max_blocks;  // of a sequence
        BlockPool pool;
    };
    struct Group {
        int64_t window;
        Regions regions;
        std::vector<Class> classes;
        std::vector<int> layers;
        KeptMeans means;

        int64_t origin(int c) const { return c == 0 ? 0 : regions.sinks; }
    };
    struct Place {
        int group, index;  // of a layer: in its group
        Backend* backend;
    };
    using GroupClass = std::pair<int, int>;
    /// What a sequence has of a class.
    struct Kept {
        std::vector<int32_t> table;
        int64_t first = 0;           // position of the oldest row that was not given back; class 0
        int64_t end = 0;             // after the newest row of the region; older classes
        std::vector<int32_t> means;  // KeptMeans of its first stretches; class 0

        int64_t front() const { return first / kBlockTokens; }  // its block
    };
    struct Sequence {
        std::vector<std::vector<Kept>> groups;  // of each its classes
        int64_t length = 0;
        int64_t reserved = 0;  // its length with what reserve() made room for last
        int64_t skipped = 0;   // tokens without rows, see thin()
        bool placed = false;   // rows that place() put where they belong, or will: until settle()
    };
    /// Rows [begin, end) that go from one class, or -1: dense rows, to another.
    struct Move {
        int from, to;
        int64_t begin, end;
    };

    const BlockPool& pool(int layer, int c) const { return groups_[where_[layer].group].classes[c].pool; }
    const BlockPool& pool_of(GroupClass at) const { return groups_[at.first].classes[at.second].pool; }
    GroupClass scarcest_class() const;
    /// n slots of rows of a layer that change their class.
    Tensor moved_slots(int layer, int64_t n) const {
        return {slots_.at(where_[layer].backend).data.get(), DType::I32, 1, n};
    }
    Slots slots(int layer, int c, int plane, Tensor slots) const;
    Sequence& find(int sequence);
    const Sequence& find(int sequence) const;
    Sequence empty() const;
    int64_t n_blocks(const Regions& regions, int c, int64_t of_sequence) const;
    int64_t blocks_wanted(int group, int c, Growth growth) const {
        return groups_[group].regions.n_classes > 1 ? aged_blocks_taken(group, c, growth)
                                                    : blocks_taken(group, growth);
    }
    int64_t blocks_taken(int group, Growth growth) const;
    static KeptMeans means_of(const Group& group, const std::vector<LayerRows>& layers);
    void require_free(const Group& group, int c, int64_t blocks) const;
    void own_block(Class& of, int32_t& block);
    static void give_back(Group& group, Kept& kept, int64_t front);
    std::vector<Region> regions_of(const Sequence& s, int group) const;

    // Of groups whose rows age: kv_cache_regions.cpp.
    bool is_placed(int64_t n) const { return n > limits_.stored; }
    int64_t max_blocks(const Regions& regions, int c) const;
    int64_t aged_blocks_taken(int group, int c, Growth growth) const;
    void reserve_placed(Group& group, std::vector<Kept>& classes, int64_t before, int64_t length);
    void settle(Group& group, std::vector<Kept>& classes, const Sequence& s);
    void move(const Group& group, const std::vector<Kept>& classes, const Move& move);
    void move(int layer, const std::vector<Kept>& classes, const Move& move, const DenseRows* dense);
    void retreat(Group& group, std::vector<Kept>& classes, int64_t length);
    /// Whether rows are forgotten that a text of this length reads.
    static bool forgot(const Group& group, const std::vector<Kept>& classes, int64_t length);
    void require_retreat(const Group& group, const std::vector<Kept>& classes, int64_t length) const;
    static void drop_unread(Group& group, std::vector<Kept>& classes, int64_t length);
    void require_parts(int64_t from) const;
    /// Reads what save() wrote of a group's regions; returns its bytes.
    size_t restore_ends(const Group& group, std::vector<Kept>& classes, int64_t length,
                        std::span<const std::byte> bytes) const;
    void tile(Group& group, Kept& kept, int64_t length);
    void tile_aged(Group& group, std::vector<Kept>& classes, int64_t before, int64_t length);

    static constexpr int64_t kMoved = 512;  // rows that change their class at once

    int64_t n_ctx_, n_seqs_, cache_tokens_;
    StepLimits limits_;
    Recode recode_;
    std::map<const Backend*, Buffer> slots_;  // I32, of rows that change their class
    std::vector<Group> groups_;
    std::vector<Place> where_;  // each layer
    std::map<int, Sequence> sequences_;
    int next_ = 0;
};

}  // namespace slimrt
