// Sequences, and the rows that all layers keep of them in blocks (paged attention: Kwon et al., 2023).
//
// Layers that keep rows of the same positions are a group: those with full attention, or those with one size
// of sliding window, and whose rows age alike (Regions). A group has a pool of blocks for each class of rows,
// and each sequence a block table in it: entry i is the block of positions origin + [i * kBlockTokens, (i +
// 1) * kBlockTokens), or -1 where the sequence has no rows of that class. The origin is 0, in older classes
// the number of sinks. Forked sequences share blocks and copy one before writing to it.
//
// Rows behind a window are read again only after truncating. So a sequence keeps as many blocks as a window
// and one step need, and gives the oldest back when it needs another: what at most longest_step tokens have
// appended can always be undone.
//
// Rows change class at the end of the append that made them old (age_rows()), so that a failed append can be
// undone. A long append never has all of its rows in class 0: each layer computes it over DenseRows, and then
// stores its rows in the classes where they belong (place()).
#pragma once

#include <functional>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "cache/block_pool.h"
#include "cache/kept_means.h"

namespace slimrt {

/// What a layer keeps, and on which backend: a row for each token, for the next `window` positions (0: all),
/// in a format for each class of rows. No formats: no rows of its own.
struct LayerRows {
    Backend* backend;
    std::vector<Format> formats;
    int64_t window = 0;
    Regions regions;
    bool sparse = false;  // sparse attention: means are kept where rows neither age nor leave a window
};

/// How rows of a layer change their class: CacheMode::recode().
using Recode = std::function<void(int layer, const Recoding&)>;

/// The most tokens that a step appends to a sequence: at all, and with their rows in class 0.
struct StepLimits {
    int64_t longest, stored;
};

/// Blocks for so many tokens, from the first row of a block on.
inline int64_t blocks_for(int64_t tokens) { return (tokens + kBlockTokens - 1) / kBlockTokens; }

/// The most blocks that so many consecutive rows can be in.
inline int64_t blocks_across(int64_t rows) { return (rows + kBlockTokens - 2) / kBlockTokens + 1; }

class KvCache {
  public:
    static constexpr int kBlockTokens = slimrt::kBlockTokens;
    /// Handles of sequences, and by how many tokens each grows.
    using Growth = std::span<const std::pair<int, int64_t>>;

    /// cache_tokens: room for the tokens of all sequences together, at least n_ctx; 0: n_seqs * n_ctx. At
    /// most n_seqs sequences grow at once.
    KvCache(const std::vector<LayerRows>& layers, int64_t n_ctx, int n_seqs, int64_t cache_tokens,
            StepLimits limits, Recode recode = {});

    int64_t n_ctx() const { return n_ctx_; }
    /// Bytes of a token's row in the oldest class, where it ends.
    size_t bytes_per_token(int layer) const;
    /// Bytes of the rows, with scales, that a layer keeps of a sequence; their blocks may be larger.
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
    /// A fork without the middle of a sequence: with so many of its first and last blocks. Its length is that
    /// of these rows; tokens appended to it continue the positions of the whole sequence. Throws
    /// Error{argument} where there is no middle, Error{unsupported} where layers have a window or rows age.
    int thin(int sequence, int64_t first, int64_t last);
    /// How many tokens thin() left out of it.
    int64_t skipped(int sequence) const { return find(sequence).skipped; }
    int64_t length(int sequence) const { return find(sequence).length; }
    /// Throws Error{argument} for a length beyond its own, and where can_truncate() is false.
    void truncate(int sequence, int64_t length);
    /// Whether all rows that a sequence of this length reads are still there, neither behind a window nor
    /// forgotten; always true for 0.
    bool can_truncate(int sequence, int64_t length) const;

    int n_groups() const { return int(groups_.size()); }
    int group_of(int layer) const { return where_[layer].group; }
    const int32_t* table(int sequence, int group, int c = 0) const;
    /// KeptMeans of its first stretches, as in AttentionSequence.
    std::span<const int32_t> means(int sequence, int group) const {
        return find(sequence).groups[group][0].means;
    }
    /// The first row that tokens at positions from `length` on read.
    int64_t begin(int group, int64_t length) const;
    /// Where a sequence's rows are, oldest region first; the last one is the newest rows. All sequences have
    /// the same number of regions, of the same classes; some may be empty.
    std::vector<Region> regions_of(int sequence, int group) const;

    /// Throws Error{context_overflow} unless all sequences can grow by their counts; changes nothing.
    void require_room(Growth growth) const;
    /// Whether require_room() would not throw.
    bool has_room(Growth growth) const;
    /// The pool with the smallest share of free blocks, and how many blocks a sequence uses in it: all, and
    /// those that it shares with no other.
    const BlockPool& scarcest() const { return pool_of(scarcest_class()); }
    std::pair<int64_t, int64_t> blocks(int sequence) const;
    /// Makes the next n rows of a sequence writable, n at most StepLimits::longest. Its length grows at
    /// commit(); until then truncate() to its length undoes this, and must be the next call for it.
    void reserve(int sequence, int64_t n);
    /// Appends these rows' slots in the layers of a group to `slots`; none where place() will store them.
    void add_slots(int sequence, int group, int64_t n, std::vector<int32_t>& slots) const;
    /// Stores a layer's reserved rows that have no slots, from dense rows of all positions.
    void place(int sequence, int layer, const DenseRows& dense);
    void commit(int sequence, int64_t n) { find(sequence).length += n; }
    /// Moves rows that have aged to their classes. Must end each append.
    void age_rows(int sequence);
    /// On a dry backend: counts the memory of moving rows to other classes, with rows of no sequence.
    void count_recoding();

    /// Views of a layer's planes for reading and writing.
    std::vector<Rows> rows(int layer, int c = 0) const;
    Slots slots(int layer, int plane, Tensor slots) const { return this->slots(layer, 0, plane, slots); }

    /// The rows of a sequence, from token `from` on, that later tokens may read, as bytes: for each group the
    /// ends of its regions, if there are several, then the regions' rows (see BlockPool::visit_rows). Throws
    /// Error{argument} unless `from` is the start of one of its blocks, Error{unsupported} for from > 0 where
    /// rows before it change as a sequence grows.
    std::vector<std::byte> save(int sequence, int64_t from) const;
    /// Appends what save() gave to a sequence of `from` tokens, which then has `length`. Throws
    /// Error{format}, Error{argument} for another sequence, Error{context_overflow} where blocks for its rows
    /// are missing: a truncated sequence may have more aged rows than one that grew to its length.
    void restore(int sequence, std::span<const std::byte> bytes, int64_t from, int64_t length);

    /// Lengthens a sequence to `length` tokens with copies of its own blocks in turn: a long context for
    /// measurements. Throws Error{argument} unless both lengths are whole blocks, at least one.
    void tile(int sequence, int64_t length);

  private:
    struct Class {
        int64_t max_blocks;  // of one sequence
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
        int group, index;  // of a layer, and its index in the group
        Backend* backend;
    };
    using GroupClass = std::pair<int, int>;
    /// What a sequence keeps in a class.
    struct Kept {
        std::vector<int32_t> table;
        int64_t first = 0;           // class 0: position of the oldest row that was not given back
        int64_t end = 0;             // older classes: end of the region
        std::vector<int32_t> means;  // class 0: KeptMeans of the first stretches

        int64_t front() const { return first / kBlockTokens; }  // block of `first`
    };
    struct Sequence {
        std::vector<std::vector<Kept>> groups;  // by group and class
        int64_t length = 0;
        int64_t reserved = 0;  // length after the last reserve()
        int64_t skipped = 0;   // tokens left out by thin()
        bool placed = false;   // rows of a long append, which place() stores; until age_rows()
    };
    /// Rows [begin, end) that move from one class (-1: dense rows) to another.
    struct Move {
        int from, to;
        int64_t begin, end;
    };

    const BlockPool& pool(int layer, int c) const { return groups_[where_[layer].group].classes[c].pool; }
    const BlockPool& pool_of(GroupClass at) const { return groups_[at.first].classes[at.second].pool; }
    GroupClass scarcest_class() const;
    /// Memory for n slots of a layer's rows that change their class.
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

    // Groups whose rows age: kv_cache_regions.cpp.
    bool is_placed(int64_t n) const { return n > limits_.stored; }
    int64_t max_blocks(const Regions& regions, int c) const;
    int64_t aged_blocks_taken(int group, int c, Growth growth) const;
    void reserve_placed(Group& group, std::vector<Kept>& classes, int64_t before, int64_t length);
    void age_rows(Group& group, std::vector<Kept>& classes, const Sequence& s);
    void move(const Group& group, const std::vector<Kept>& classes, const Move& move);
    void move(int layer, const std::vector<Kept>& classes, const Move& move, const DenseRows* dense);
    void retreat(Group& group, std::vector<Kept>& classes, int64_t length);
    /// Whether rows are forgotten that a sequence of this length reads.
    static bool forgot(const Group& group, const std::vector<Kept>& classes, int64_t length);
    void require_retreat(const Group& group, const std::vector<Kept>& classes, int64_t length) const;
    static void drop_unread(Group& group, std::vector<Kept>& classes, int64_t length);
    void require_parts(int64_t from) const;
    /// Reads the ends of a group's regions as save() wrote them; returns how many bytes they took.
    size_t restore_ends(const Group& group, std::vector<Kept>& classes, int64_t length,
                        std::span<const std::byte> bytes) const;
    void tile(Group& group, Kept& kept, int64_t length);
    void tile_aged(Group& group, std::vector<Kept>& classes, int64_t before, int64_t length);

    static constexpr int64_t kMoved = 512;  // rows that change their class at a time

    int64_t n_ctx_, n_seqs_, cache_tokens_;
    StepLimits limits_;
    Recode recode_;
    std::map<const Backend*, Buffer> slots_;  // I32, of rows that change their class
    std::vector<Group> groups_;
    std::vector<Place> where_;  // by layer
    std::map<int, Sequence> sequences_;
    int next_ = 0;
};

}  // namespace slimrt
