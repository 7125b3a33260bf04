#include "cache/kv_cache.h"

#include <algorithm>
#include <cassert>

#include "core/error.h"

namespace slimrt {

namespace {

constexpr int64_t kMaxTokens = 1 << 28;  // slots are int32, with room to spare

}  // namespace

KvCache::KvCache(const std::vector<LayerRows>& layers, int64_t n_ctx, int n_seqs, int64_t cache_tokens,
                 StepLimits limits, Recode recode)
    : n_ctx_(n_ctx),
      n_seqs_(n_seqs),
      cache_tokens_(cache_tokens),
      limits_(limits),
      recode_(std::move(recode)) {
    std::vector<std::vector<std::vector<BlockPool::Stored>>> stored;  // by group, class and layer
    for (const LayerRows& layer : layers) {
        const auto known = std::ranges::find_if(groups_, [&](const Group& group) {
            return group.window == layer.window && group.regions == layer.regions;
        });
        const int group = int(known - groups_.begin());
        if (known == groups_.end()) {
            groups_.push_back({layer.window, layer.regions, {}, {}, {}});
            stored.emplace_back(layer.regions.n_classes);
        }
        where_.push_back({group, int(groups_[group].layers.size()), layer.backend});
        groups_[group].layers.push_back(int(where_.size()) - 1);
        for (int c = 0; c < layer.regions.n_classes; ++c)
            stored[group][c].push_back({layer.backend, layer.formats.empty() ? Format{} : layer.formats[c]});
        Buffer* const slots = layer.regions.n_classes > 1 ? &slots_[layer.backend] : nullptr;
        if (slots && !slots->data)
            *slots =
                layer.backend->alloc(MemoryKind::scratch, kMoved * sizeof(int32_t), "slots of aging rows");
    }
    for (size_t g = 0; g < groups_.size(); ++g) {
        const auto& [window, regions, classes, of_group, means] = groups_[g];
        assert(window == 0 || regions.n_classes == 1);
        for (int c = 0; c < regions.n_classes; ++c) {
            const int64_t all = blocks_for(n_ctx), rows = window - 1 + std::min(limits.longest, n_ctx);
            const int64_t blocks = window                  ? std::min(all, blocks_across(rows))
                                   : regions.n_classes > 1 ? max_blocks(regions, c)
                                                           : all;
            groups_[g].classes.push_back(
                {blocks, BlockPool(std::move(stored[g][c]), n_blocks(regions, c, blocks))});
        }
        groups_[g].means = means_of(groups_[g], layers);
    }
}

/// A mean for each stretch of the group's blocks, where no rows leave by a window or by aging.
KeptMeans KvCache::means_of(const Group& group, const std::vector<LayerRows>& layers) {
    const bool all_stay = group.window == 0 && group.regions.n_classes == 1;
    std::vector<KeptMeans::Layer> kept;
    bool any = false;
    for (const int layer : group.layers) {
        const auto& [backend, formats, window, regions, sparse] = layers[layer];
        kept.push_back({backend, sparse && !formats.empty() ? formats[0] : Format{}});
        any |= sparse;
    }
    return all_stay && any ? KeptMeans(kept, group.classes[0].pool.n_blocks() / kStretchBlocks) : KeptMeans();
}

/// Blocks of the pool of class c, of which one sequence takes at most `of_sequence`.
int64_t KvCache::n_blocks(const Regions& r, int c, int64_t of_sequence) const {
    if (cache_tokens_ == 0) {
        if (of_sequence > kMaxTokens / kBlockTokens / n_seqs_)
            fail(ErrorCode::argument, "a cache of ", n_ctx_, " tokens x ", n_seqs_,
                 " sequences, in blocks of ", kBlockTokens, ", is more than the ", kMaxTokens,
                 " tokens slimrt can address");
        return of_sequence * n_seqs_;
    }
    if (cache_tokens_ > kMaxTokens)
        fail(ErrorCode::argument, "a cache of ", cache_tokens_, " tokens is more than the ", kMaxTokens,
             " tokens slimrt can address");
    const int64_t all = blocks_for(cache_tokens_), one = blocks_for(n_ctx_);
    const int64_t share = (of_sequence * all + one - 1) / one;
    // A region that does not grow with its sequence takes as much of short sequences as of long ones.
    const bool grows = c == r.n_classes - 1 ? c > 0 : c > 0 && r.shares[c - 1].blocks == 0;
    return grows ? share : std::max(share, std::min(n_seqs_ * of_sequence, all));
}

size_t KvCache::bytes_per_token(int layer) const {
    return pool(layer, n_classes(layer) - 1).block_bytes(where_[layer].index) / kBlockTokens;
}

size_t KvCache::bytes_held(int layer, int64_t length) const {
    const Regions& r = regions(layer);
    int64_t n_rows = std::min(length, max_rows(layer));
    size_t bytes = 0;
    for (int c = r.n_classes - 1; c > 0; --c) {
        const int64_t aged = r.begin(c - 1, length) - r.begin(c, length);
        bytes += aged / kBlockTokens * pool(layer, c).block_bytes(where_[layer].index);
        n_rows -= aged;
    }
    return bytes + n_rows * pool(layer, 0).block_bytes(where_[layer].index) / kBlockTokens;
}

int64_t KvCache::max_rows(int layer) const {
    const Group& group = groups_[group_of(layer)];
    return group.window ? std::min(n_ctx_, group.classes[0].max_blocks * kBlockTokens) : n_ctx_;
}

KvCache::Sequence& KvCache::find(int sequence) {
    const auto it = sequences_.find(sequence);
    if (it == sequences_.end()) fail(ErrorCode::argument, "there is no sequence ", sequence);
    return it->second;
}
const KvCache::Sequence& KvCache::find(int sequence) const {
    return const_cast<KvCache*>(this)->find(sequence);
}

KvCache::Sequence KvCache::empty() const {
    Sequence s;
    for (const Group& group : groups_)
        s.groups.emplace_back(group.regions.n_classes, Kept{.end = group.regions.sinks});
    return s;
}

int KvCache::create() {
    sequences_[next_] = empty();
    return next_++;
}

void KvCache::release(int sequence) {
    truncate(sequence, 0);
    sequences_.erase(sequence);
}

int KvCache::fork(int sequence) {
    Sequence copy = find(sequence);
    for (size_t g = 0; g < groups_.size(); ++g)
        for (size_t c = 0; c < groups_[g].classes.size(); ++c)
            for (const int32_t block : copy.groups[g][c].table)
                if (block >= 0) groups_[g].classes[c].pool.share(block);
    for (size_t g = 0; g < groups_.size(); ++g) groups_[g].means.share(copy.groups[g][0].means);
    sequences_[next_] = std::move(copy);
    return next_++;
}

int KvCache::thin(int sequence, int64_t first, int64_t last) {
    const int64_t all = blocks_for(length(sequence)), end = all - last;
    for (const Group& group : groups_)
        if (group.window || group.regions.n_classes > 1)
            fail(ErrorCode::unsupported, "rows behind a window, or that age, cannot be left out of a fork");
    if (first < 0 || last < 1 || first >= end)
        fail(ErrorCode::argument, "a sequence of ", length(sequence), " tokens has ", all,
             " blocks: nothing is between its first ", first, " and its last ", last);
    const int id = fork(sequence);
    Sequence& s = find(id);
    for (size_t g = 0; g < groups_.size(); ++g) {
        std::vector<int32_t>& table = s.groups[g][0].table;
        const auto out = std::span(table).subspan(first, end - first);
        for (const int32_t block : out) groups_[g].classes[0].pool.drop(block);
        table.erase(table.begin() + first, table.begin() + end);
        groups_[g].means.cut(s.groups[g][0].means, first * kBlockTokens);
    }
    s.skipped += (end - first) * kBlockTokens;
    s.length -= (end - first) * kBlockTokens;
    return id;
}

void KvCache::truncate(int sequence, int64_t length) {
    Sequence& s = find(sequence);
    if (length < 0 || length > s.length)
        fail(ErrorCode::argument, "cannot truncate a sequence of ", s.length, " tokens to ", length);
    for (size_t g = 0; g < groups_.size() && length > 0; ++g) {
        const int64_t first = s.groups[g][0].first, window = groups_[g].window;
        if (begin(int(g), length) < first)
            fail(ErrorCode::argument, "cannot truncate a sequence of ", s.length, " tokens to ", length,
                 ": layers with a window of ", window, " tokens have given back the rows before position ",
                 first, ", which a text shorter than ", first + window - 1,
                 " tokens needs. Truncate to no less than that, or to 0, and append the tokens again");
        if (forgot(groups_[g], s.groups[g], length))
            fail(ErrorCode::argument, "cannot truncate a sequence of ", s.length, " tokens to ", length,
                 ": rows before position ", s.groups[g].back().end,
                 " are forgotten, of which a text of that length still reads some. Truncate to 0, and append "
                 "the tokens again");
        if (groups_[g].classes.size() > 1) require_retreat(groups_[g], s.groups[g], length);
    }
    for (size_t g = 0; g < groups_.size(); ++g) {
        auto& [table, first, end, means] = s.groups[g][0];
        BlockPool& pool = groups_[g].classes[0].pool;
        groups_[g].means.cut(means, length);
        for (; int64_t(table.size()) > blocks_for(length); table.pop_back())
            if (table.back() >= 0) pool.drop(table.back());
        if (length == 0) first = 0;
        if (groups_[g].classes.size() > 1) retreat(groups_[g], s.groups[g], length);
    }
    if (length == 0) s.skipped = 0;
    s.length = length;
    s.placed = false;
}

bool KvCache::can_truncate(int sequence, int64_t length) const {
    const Sequence& s = find(sequence);
    if (length <= 0 || length > s.length) return length == 0;
    for (size_t g = 0; g < groups_.size(); ++g)
        if (begin(int(g), length) < s.groups[g][0].first || forgot(groups_[g], s.groups[g], length))
            return false;
    return true;
}

const int32_t* KvCache::table(int sequence, int group, int c) const {
    return find(sequence).groups[group][c].table.data();
}

int64_t KvCache::begin(int group, int64_t length) const {
    const int64_t window = groups_[group].window;
    return window ? std::max<int64_t>(0, length - window + 1) : 0;
}

std::vector<Region> KvCache::regions_of(int sequence, int group) const {
    return regions_of(find(sequence), group);
}

std::vector<Region> KvCache::regions_of(const Sequence& s, int group) const {
    const std::vector<Kept>& classes = s.groups[group];
    const int64_t sinks = groups_[group].regions.sinks;
    if (classes.size() == 1) return {{0, 0, begin(group, s.length), s.length}};
    std::vector<Region> regions;
    if (sinks > 0) regions.push_back({0, 0, 0, std::min(sinks, s.length)});
    int64_t begin = sinks;
    for (int c = int(classes.size()) - 1; c > 0; begin = classes[c--].end)
        regions.push_back({c, sinks, begin, classes[c].end});
    regions.push_back({0, 0, std::min(begin, s.length), s.length});
    return regions;
}

/// The most free blocks that this growth takes at any time: new blocks, less those given back behind a
/// window, which become free unless another sequence shares them.
int64_t KvCache::blocks_taken(int group, Growth growth) const {
    const auto& [max_blocks, pool] = groups_[group].classes[0];
    int64_t taken = 0, most = 0;
    std::map<int32_t, int> left;  // how many sequences will have stopped sharing a block
    for (const auto& [id, n] : growth) {
        const Sequence& s = find(id);
        const Kept& kept = s.groups[group][0];
        const int64_t n_old = int64_t(kept.table.size()), end = blocks_for(s.length + n);
        // False: nobody else shares the block, so it becomes free.
        const auto leave_shared = [&, &pool = pool](int64_t i) {
            const int32_t block = kept.table[i];
            return pool.users(block) - left[block] > 1 && ++left[block];
        };
        // A shared last block is copied before it is written to; the last sequence that shares it keeps it.
        const int64_t tail = n > 0 && s.length % kBlockTokens ? s.length / kBlockTokens : -1;
        const bool copied = tail >= 0 && leave_shared(tail);
        most = std::max(most, taken += copied);
        for (int64_t i = n_old, front = kept.front(); i < end; ++i) {
            if (i - front == max_blocks) {
                const bool own = front >= n_old || (front == tail && copied) || !leave_shared(front);
                taken -= own;
                ++front;
            }
            most = std::max(most, ++taken);
        }
    }
    return most;
}

void KvCache::require_free(const Group& group, int c, int64_t blocks) const {
    const BlockPool& pool = group.classes[c].pool;
    if (blocks <= pool.n_free()) return;
    const std::string whose = group.window ? concat(" for the layers with a window of ", group.window) : "";
    const bool by_sequences = pool.n_blocks() == n_seqs_ * group.classes[c].max_blocks;
    const char* raise = !by_sequences  ? "cache_tokens (--cache-tokens)"
                        : group.window ? "n_seqs"
                                       : "n_seqs or n_ctx";
    fail(ErrorCode::context_overflow, "the cache has ", pool.n_free(), " free blocks of ", kBlockTokens,
         " tokens", whose, " and ", blocks, " are needed. Raise ", raise,
         ", or end the texts and close the sessions that hold the others");
}

bool KvCache::has_room(Growth growth) const {
    for (const auto& [id, n] : growth)
        if (n > n_ctx_ - find(id).length - skipped(id)) return false;
    for (int g = 0; g < n_groups(); ++g)
        for (int c = 0; c < groups_[g].regions.n_classes; ++c)
            if (blocks_wanted(g, c, growth) > pool_of({g, c}).n_free()) return false;
    return true;
}

KvCache::GroupClass KvCache::scarcest_class() const {
    GroupClass least{0, 0};
    for (int g = 0; g < n_groups(); ++g)
        for (int c = 0; c < groups_[g].regions.n_classes; ++c) {
            const BlockPool &pool = pool_of({g, c}), &known = pool_of(least);
            if (pool.n_free() * known.n_blocks() < known.n_free() * pool.n_blocks()) least = {g, c};
        }
    return least;
}

std::pair<int64_t, int64_t> KvCache::blocks(int sequence) const {
    const GroupClass at = scarcest_class();
    int64_t held = 0, alone = 0;
    for (const int32_t block : find(sequence).groups[at.first][at.second].table) {
        held += block >= 0;
        alone += block >= 0 && pool_of(at).users(block) == 1;
    }
    return {held, alone};
}

void KvCache::require_room(Growth growth) const {
    for (const auto& [id, n] : growth)
        if (const int64_t length = find(id).length + skipped(id); length + n > n_ctx_)
            fail(ErrorCode::context_overflow, "the context is full: ", length, " tokens are cached and ", n,
                 " more do not fit in n_ctx ", n_ctx_,
                 ": truncate, or raise n_ctx (--ctx) if the model has positions for more");
    for (int g = 0; g < n_groups(); ++g)
        for (int c = 0; c < groups_[g].regions.n_classes; ++c)
            require_free(groups_[g], c, blocks_wanted(g, c, growth));
}

/// Gives back the blocks before index `front`.
void KvCache::give_back(Group& group, Kept& kept, int64_t front) {
    for (int64_t i = kept.front(); i < front; ++i) {
        group.classes[0].pool.drop(kept.table[i]);
        kept.table[i] = -1;
        kept.first = (i + 1) * kBlockTokens;
    }
}

/// Makes a block writable: a copy of one that is shared (copy on write), a new one where there is none.
void KvCache::own_block(Class& of, int32_t& block) {
    if (block >= 0 && of.pool.users(block) == 1) return;
    const int32_t own = of.pool.take();
    if (block >= 0) {
        of.pool.copy(block, own);
        of.pool.drop(block);
    }
    block = own;
}

void KvCache::reserve(int sequence, int64_t n) {
    Sequence& s = find(sequence);
    const int64_t end = blocks_for(s.length + n);
    for (size_t g = 0; g < groups_.size(); ++g) {
        Group& group = groups_[g];
        Class& written = group.classes[0];
        Kept& kept = s.groups[g][0];
        if (group.classes.size() > 1 && is_placed(n)) {
            reserve_placed(group, s.groups[g], s.length, s.length + n);
            continue;
        }
        if (group.window) give_back(group, kept, end - written.max_blocks);
        assert(kept.first <= begin(int(g), s.length));
        if (n > 0 && s.length % kBlockTokens) own_block(written, kept.table[s.length / kBlockTokens]);
        while (int64_t(kept.table.size()) < end) kept.table.push_back(written.pool.take());
        group.means.grow(kept.means, s.length);
    }
    s.reserved = s.length + n;
    s.placed = is_placed(n);
}

void KvCache::add_slots(int sequence, int group, int64_t n, std::vector<int32_t>& slots) const {
    const Sequence& s = find(sequence);
    if (s.placed && groups_[group].classes.size() > 1) return;
    const std::vector<int32_t>& table = s.groups[group][0].table;
    for (int64_t p = s.length; p < s.length + n; ++p)
        slots.push_back(table[p / kBlockTokens] * kBlockTokens + int32_t(p % kBlockTokens));
}

std::vector<Rows> KvCache::rows(int layer, int c) const {
    std::vector<Rows> views;
    for (size_t p = 0; p < format(layer, c).size(); ++p) {
        views.push_back(pool(layer, c).rows(where_[layer].index, int(p)));
        if (c == 0) views.back().means = groups_[where_[layer].group].means.of(where_[layer].index, int(p));
    }
    return views;
}

Slots KvCache::slots(int layer, int c, int plane, Tensor slots) const {
    return pool(layer, c).slots(where_[layer].index, plane, slots);
}

}  // namespace slimrt
