// Groups whose rows age: from class to class, and back where a sequence is truncated.
#include <algorithm>
#include <map>
#include <vector>

#include "cache/attend.h"
#include "cache/kv_cache.h"
#include "core/error.h"

namespace slimrt {
namespace {

/// Whether block i of a table that counts from `origin` has any of the rows [begin, end).
bool holds(int64_t i, int64_t origin, int64_t begin, int64_t end) {
    return origin + i * kBlockTokens < end && origin + (i + 1) * kBlockTokens > begin && begin < end;
}

/// Whether class c has rows in block i of its table when the rows of a sequence of this length have aged.
bool holds_after_aging(const Regions& r, int c, int64_t i, int64_t length) {
    if (c == 0) return holds(i, 0, r.begin(0, length), length) || holds(i, 0, 0, std::min(r.sinks, length));
    return holds(i, r.sinks, r.begin(c, length), r.begin(c - 1, length));
}

/// How many entries class c's table has then.
int64_t table_size(const Regions& r, int c, int64_t length) {
    return c == 0 ? blocks_for(length)
                  : std::max<int64_t>(0, r.begin(c - 1, length) - r.sinks) / kBlockTokens;
}

}  // namespace

/// The most blocks of a sequence. Class 0 has the sinks, the recent rows, and those that a step adds before
/// rows age; around a long append, the recent rows of before and of after. Classes between the first and the
/// last may have a region twice while a long append is stored.
int64_t KvCache::max_blocks(const Regions& r, int c) const {
    const int64_t all = blocks_for(n_ctx_);
    if (c == 0) {
        const int64_t newest = r.recent + kBlockTokens - 1;
        const int64_t blocks = std::max(blocks_across(newest + limits_.stored), 2 * blocks_across(newest));
        return std::min(all, blocks_for(r.sinks) + blocks);
    }
    const int64_t rows = r.begin(c - 1, n_ctx_) - r.begin(c, n_ctx_), blocks = rows / kBlockTokens;
    return std::min(all, c == r.n_classes - 1 ? blocks : 2 * (blocks + 1));
}

int64_t KvCache::aged_blocks_taken(int group, int c, Growth growth) const {
    const Regions& r = groups_[group].regions;
    const BlockPool& pool = groups_[group].classes[c].pool;
    int64_t taken = 0;
    std::map<int32_t, int> left;  // how many sequences will have stopped sharing a block: the last keeps it
    for (const auto& [id, n] : growth) {
        const Sequence& s = find(id);
        const std::vector<int32_t>& table = s.groups[group][c].table;
        const int64_t length = s.length + n;
        for (int64_t i = int64_t(table.size()); i < table_size(r, c, length); ++i)
            taken += holds_after_aging(r, c, i, length) || (c == 0 && !is_placed(n));
        if (c > 0 || n == 0 || s.length % kBlockTokens == 0) continue;
        const int32_t tail = table.back();
        taken += tail < 0 || (pool.users(tail) - left[tail] > 1 && ++left[tail]);
    }
    return taken;
}

/// Blocks for a long append, whose rows place() stores in the classes where they belong.
void KvCache::reserve_placed(Group& group, std::vector<Kept>& classes, int64_t before, int64_t length) {
    if (before % kBlockTokens) own_block(group.classes[0], classes[0].table.back());
    for (int c = 0; c < group.regions.n_classes; ++c)
        for (auto& table = classes[c].table; int64_t(table.size()) < table_size(group.regions, c, length);) {
            const bool wanted = holds_after_aging(group.regions, c, int64_t(table.size()), length);
            table.push_back(wanted ? group.classes[c].pool.take() : -1);
        }
}

void KvCache::place(int sequence, int layer, const DenseRows& dense) {
    constexpr int kDense = -1;
    const Sequence& s = find(sequence);
    const Group& group = groups_[group_of(layer)];
    const std::vector<Kept>& classes = s.groups[group_of(layer)];
    if (group.classes.size() == 1 || !s.placed) return;
    const Regions& r = group.regions;
    const int64_t length = s.reserved;
    move(layer, classes, {kDense, 0, s.length, std::min(r.sinks, length)}, &dense);
    move(layer, classes, {kDense, 0, std::max(s.length, r.begin(0, length)), length}, &dense);
    for (int c = 1; c < r.n_classes; ++c)
        move(layer, classes,
             {kDense, c, std::max(classes[c].end, r.begin(c, length)), r.begin(c - 1, length)}, &dense);
}

void KvCache::age_rows(int sequence) {
    Sequence& s = find(sequence);
    for (size_t g = 0; g < groups_.size(); ++g)
        if (groups_[g].classes.size() > 1) age_rows(groups_[g], s.groups[g], s);
    s.placed = false;
}

void KvCache::age_rows(Group& group, std::vector<Kept>& classes, const Sequence& s) {
    const Regions& r = group.regions;
    const auto target = [&](int c) { return std::max(classes[c].end, r.begin(c - 1, s.length)); };
    if (s.placed) {
        for (int c = 1; c < r.n_classes; ++c) classes[c].end = target(c);
        return drop_unread(group, classes, s.length);
    }
    // The oldest class first: rows that move there free blocks of the next one.
    for (int c = r.n_classes - 1; c > 0; --c) {
        Kept& kept = classes[c];
        int64_t begin = kept.end;
        const int64_t end = target(c);
        if (begin == end) continue;
        while (int64_t(kept.table.size()) < table_size(r, c, s.length)) {
            const bool wanted = holds_after_aging(r, c, int64_t(kept.table.size()), s.length);
            kept.table.push_back(wanted ? group.classes[c].pool.take() : -1);
        }
        for (int from = c - 1; from >= 0; --from) {
            const int64_t until = from > 0 ? std::min(end, classes[from].end) : end;
            move(group, classes, {from, c, std::max(begin, r.begin(c, s.length)), until});
            begin = std::max(begin, until);
        }
        kept.end = end;
        drop_unread(group, classes, s.length);
    }
}

/// In all layers of the group.
void KvCache::move(const Group& group, const std::vector<Kept>& classes, const Move& move) {
    for (const int layer : group.layers) this->move(layer, classes, move, nullptr);
}

void KvCache::move(int layer, const std::vector<Kept>& classes, const Move& move, const DenseRows* dense) {
    const Group& group = groups_[group_of(layer)];
    const auto& [from, to, first, end] = move;
    if (format(layer, to).empty()) return;
    const int64_t from_origin = dense ? 0 : group.origin(from), to_origin = group.origin(to);
    std::vector<Rows> rows = dense ? std::vector<Rows>{} : this->rows(layer, from);
    for (size_t p = 0; dense && p < format(layer, to).size(); ++p) {
        rows.push_back(dense_rows(dense->planes[p], 0));
        rows.back().heads = format(layer, to)[p].heads;
    }
    const std::vector<int32_t>& table = classes[to].table;
    for (int64_t begin = first, n; begin < end; begin += n) {
        n = std::min(kMoved, end - begin);
        std::vector<int32_t> slots;
        for (int64_t p = begin - to_origin; p < begin - to_origin + n; ++p)
            slots.push_back(table[p / kBlockTokens] * kBlockTokens + int32_t(p % kBlockTokens));
        const Tensor index = moved_slots(layer, n);
        where_[layer].backend->upload(index, slots.data(), slots.size() * sizeof(int32_t));
        std::vector<Slots> to_slots;
        for (size_t p = 0; p < rows.size(); ++p) to_slots.push_back(this->slots(layer, to, int(p), index));
        recode_(layer, {.from = rows,
                        .table = dense ? nullptr : classes[from].table.data(),
                        .begin = begin - from_origin,
                        .end = begin - from_origin + n,
                        .to = to_slots,
                        .to_table = table.data(),
                        .to_begin = begin - to_origin,
                        .from_aged = from > 0,
                        .to_aged = to > 0});
    }
}

void KvCache::drop_unread(Group& group, std::vector<Kept>& classes, int64_t length) {
    const int64_t sinks = group.regions.sinks;
    int64_t begin = sinks;
    for (int c = int(classes.size()) - 1; c >= 0; begin = classes[c--].end)
        for (int64_t i = 0; i < int64_t(classes[c].table.size()); ++i) {
            int32_t& block = classes[c].table[i];
            const bool read = c > 0 ? holds(i, sinks, begin, classes[c].end)
                                    : holds(i, 0, begin, length) || holds(i, 0, 0, std::min(sinks, length));
            if (block < 0 || read) continue;
            group.classes[c].pool.drop(block);
            block = -1;
        }
}

namespace {

/// The end of the aged blocks that stay when a sequence is truncated to `length`: the rows of a divided block
/// go back to class 0.
int64_t whole_blocks(const Regions& r, int64_t length) {
    return length <= r.sinks ? r.sinks : r.sinks + (length - r.sinks) / kBlockTokens * kBlockTokens;
}

}  // namespace

bool KvCache::forgot(const Group& group, const std::vector<Kept>& classes, int64_t length) {
    const Regions& r = group.regions;
    return r.forgets && length > r.sinks && classes.back().end > r.begin(r.n_classes - 2, length);
}

void KvCache::require_retreat(const Group& group, const std::vector<Kept>& classes, int64_t length) const {
    const int64_t begin = whole_blocks(group.regions, length), size = int64_t(classes[0].table.size());
    if (length >= classes[1].end || begin >= length) return;
    int64_t wanted = 0, freed = 0;
    for (int64_t i = 0; i < size; ++i) {
        const int32_t block = classes[0].table[i];
        const bool own = block >= 0 && group.classes[0].pool.users(block) == 1;
        holds(i, 0, begin, length) ? wanted += !own : freed += own && i >= blocks_for(length);
    }
    require_free(group, 0, wanted - freed);
}

void KvCache::retreat(Group& group, std::vector<Kept>& classes, int64_t length) {
    const int64_t begin = whole_blocks(group.regions, length);
    if (length < classes[1].end) {
        for (int64_t i = begin / kBlockTokens; begin < length && i < blocks_for(length); ++i)
            own_block(group.classes[0], classes[0].table[i]);
        int from = 1;
        while (from + 1 < group.regions.n_classes && classes[from + 1].end > begin) ++from;
        move(group, classes, {from, 0, begin, length});
        for (size_t c = 1; c < classes.size(); ++c) classes[c].end = std::min(classes[c].end, begin);
    }
    for (size_t c = 1; c < classes.size(); ++c)
        for (auto& table = classes[c].table;
             int64_t(table.size()) > (classes[c].end - group.regions.sinks) / kBlockTokens; table.pop_back())
            if (table.back() >= 0) group.classes[c].pool.drop(table.back());
}

void KvCache::count_recoding() {
    for (int layer = 0; layer < int(where_.size()); ++layer)
        for (int c = 1; c < n_classes(layer); ++c) {
            if (format(layer, c).empty()) continue;
            const Tensor index = moved_slots(layer, kBlockTokens);
            for (const auto& [from, to] : {std::pair(c - 1, c), std::pair(c, 0)}) {
                std::vector<Slots> slots;
                for (size_t p = 0; p < format(layer, to).size(); ++p)
                    slots.push_back(this->slots(layer, to, int(p), index));
                recode_(layer, {.from = rows(layer, from),
                                .table = nullptr,
                                .begin = 0,
                                .end = kBlockTokens,
                                .to = slots,
                                .from_aged = from > 0,
                                .to_aged = to > 0});
            }
        }
}

/// The newest rows move to the end as they are; each older class gets copies of its own blocks.
void KvCache::tile_aged(Group& group, std::vector<Kept>& classes, int64_t before, int64_t length) {
    const Regions& r = group.regions;
    const int64_t grown = length - before, newest = classes[1].end / kBlockTokens;
    auto& written = classes[0].table;
    written.insert(written.begin() + newest, grown / kBlockTokens, -1);
    const int64_t last = classes[1].end + grown;
    int64_t begin = r.sinks;
    for (int c = r.n_classes - 1; c > 0; begin = classes[c--].end) {
        std::vector<int32_t> own;
        for (const int32_t block : classes[c].table)
            if (block >= 0) own.push_back(block);
        const int64_t end = c == 1 ? last : std::min(last, std::max(begin, r.begin(c - 1, length)));
        std::vector<int32_t> table((begin - r.sinks) / kBlockTokens, -1);
        for (int64_t i = 0, n = (end - begin) / kBlockTokens; i < n; ++i) {
            if (i < int64_t(own.size())) {
                table.push_back(own[i]);
                continue;
            }
            table.push_back(group.classes[c].pool.take());
            group.classes[c].pool.copy(own[i % own.size()], table.back());
        }
        for (int64_t i = (end - begin) / kBlockTokens; i < int64_t(own.size()); ++i)
            group.classes[c].pool.drop(own[i]);
        classes[c].table = std::move(table);
        classes[c].end = end;
    }
}

}  // namespace slimrt
