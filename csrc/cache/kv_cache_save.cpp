// Sequences saved as bytes and restored, and tiled sequences.
#include <algorithm>
#include <cstring>

#include "cache/kv_cache.h"
#include "core/error.h"

namespace slimrt {

/// Refuses a part of a sequence where the rows before it change as the sequence grows.
void KvCache::require_parts(int64_t from) const {
    for (const Group& group : groups_)
        if (from > 0 && (group.window || group.regions.n_classes > 1))
            fail(ErrorCode::unsupported,
                 "rows behind a window, or that age, are saved and loaded with those of the whole sequence "
                 "alone, "
                 "not from token ",
                 from, " on");
}

std::vector<std::byte> KvCache::save(int sequence, int64_t from) const {
    const Sequence& s = find(sequence);
    if (from < 0 || from > s.length || from % kBlockTokens)
        fail(ErrorCode::argument, "rows are saved from a multiple of ", kBlockTokens, " tokens on, of the ",
             s.length, " that there are, not from ", from);
    if (s.skipped) fail(ErrorCode::unsupported, "a thin fork lacks rows: save the sequence that it is of");
    require_parts(from);
    std::vector<std::byte> out;
    const auto grow = [&](size_t bytes) {
        out.resize(out.size() + bytes);
        return out.data() + out.size() - bytes;
    };
    for (int g = 0; g < n_groups(); ++g) {
        const std::vector<Kept>& classes = s.groups[g];
        for (size_t c = 1; c < classes.size(); ++c)
            std::memcpy(grow(sizeof(int64_t)), &classes[c].end, sizeof(int64_t));
        for (const auto& [c, origin, begin, end] : regions_of(s, g))
            groups_[g].classes[c].pool.visit_rows(
                classes[c].table, std::max(begin, from) - origin, end - origin,
                [&](Backend& backend, std::byte* rows, size_t bytes) {
                    backend.download(grow(bytes), Tensor(rows, DType::F32, 1, 0), bytes);
                });
    }
    return out;
}

size_t KvCache::restore_ends(const Group& group, std::vector<Kept>& classes, int64_t length,
                             std::span<const std::byte> bytes) const {
    const size_t size = (classes.size() - 1) * sizeof(int64_t);
    if (bytes.size() < size) fail(ErrorCode::format, "saved rows of ", length, " tokens are truncated");
    int64_t begin = group.regions.sinks;
    for (int c = int(classes.size()) - 1; c > 0; begin = classes[c--].end) {
        int64_t& end = classes[c].end;
        std::memcpy(&end, bytes.data() + (c - 1) * sizeof(int64_t), sizeof(int64_t));
        const bool whole = end >= begin && (end - begin) % kBlockTokens == 0;
        if (!whole || end < group.regions.begin(c - 1, length) || end > std::max(length, group.regions.sinks))
            fail(ErrorCode::format, "saved rows of ", length, " tokens: a region cannot end at ", end);
        if (end - begin > group.classes[c].max_blocks * kBlockTokens)
            fail(ErrorCode::context_overflow, "the saved sequence of ", length,
                 " tokens was cut from a longer one, and of its rows more have aged than an n_ctx of ",
                 n_ctx_, " has room for: raise n_ctx (--ctx)");
    }
    return size;
}

void KvCache::restore(int sequence, std::span<const std::byte> bytes, int64_t from, int64_t length) {
    constexpr int32_t kWanted = -2;
    if (from > length || length > n_ctx_ || from % kBlockTokens)
        fail(ErrorCode::format, "saved rows of ", length, " tokens from ", from, " on: n_ctx is ", n_ctx_);
    const Sequence& before = find(sequence);
    if (before.length != from)
        fail(ErrorCode::argument, "the saved rows go on from ", from, " tokens, and sequence ", sequence,
             " has ", before.length);
    if (before.skipped)
        fail(ErrorCode::unsupported, "a thin fork lacks rows: load into the sequence that it is of");
    require_parts(from);
    Sequence s = from > 0 ? before : empty();
    s.length = length;
    size_t expected = 0;
    std::vector<size_t> at;  // where each group's rows begin, in bytes
    for (int g = 0; g < n_groups(); ++g) {
        const Group& group = groups_[g];
        expected += restore_ends(group, s.groups[g], length, bytes.subspan(std::min(expected, bytes.size())));
        at.push_back(expected);
        for (const auto& [c, origin, begin, end] : regions_of(s, g)) {
            std::vector<int32_t>& table = s.groups[g][c].table;
            table.resize(blocks_for(end - origin), -1);
            const int64_t first = std::max(begin, from);
            std::fill(table.begin() + (first - origin) / kBlockTokens, table.end(), kWanted);
            expected += group.classes[c].pool.block_bytes() * size_t(end - first) / kBlockTokens;
        }
    }
    if (bytes.size() != expected)
        fail(ErrorCode::format, "saved rows of ", length, " tokens need ", expected, " bytes, the data has ",
             bytes.size());
    for (int g = 0; g < n_groups(); ++g)
        for (int c = 0; c < groups_[g].regions.n_classes; ++c)
            require_free(groups_[g], c, std::ranges::count(s.groups[g][c].table, kWanted));
    for (int g = 0; g < n_groups(); ++g) {
        s.groups[g][0].first = begin(g, length);
        for (const auto& [c, origin, begin, end] : regions_of(s, g)) {
            BlockPool& pool = groups_[g].classes[c].pool;
            for (int32_t& block : s.groups[g][c].table)
                if (block == kWanted) block = pool.take();
            pool.visit_rows(s.groups[g][c].table, std::max(begin, from) - origin, end - origin,
                            [&](Backend& backend, std::byte* rows, size_t n) {
                                backend.upload(Tensor(rows, DType::F32, 1, 0), bytes.data() + at[g], n);
                                at[g] += n;
                            });
        }
    }
    find(sequence) = std::move(s);
}

void KvCache::tile(int sequence, int64_t length) {
    Sequence& s = find(sequence);
    const auto can = [](const std::vector<Kept>& classes) {
        if (classes.size() == 1) return int64_t(classes[0].table.size()) > blocks_for(classes[0].first);
        return std::ranges::all_of(classes.begin() + 1, classes.end(), [](const Kept& kept) {
            return std::ranges::any_of(kept.table, [](int32_t block) { return block >= 0; });
        });
    };
    if (s.length == 0 || s.length % kBlockTokens || length % kBlockTokens || length < s.length ||
        !std::ranges::all_of(s.groups, can))
        fail(ErrorCode::argument, "cannot tile a sequence of ", s.length, " tokens to ", length,
             ": both must be multiples of ", kBlockTokens,
             ", it must grow, and have rows in each region of its cache");
    const std::pair<int, int64_t> growth{sequence, length - s.length};
    require_room({&growth, 1});
    for (size_t g = 0; g < groups_.size(); ++g)
        if (groups_[g].classes.size() == 1)
            tile(groups_[g], s.groups[g][0], length);
        else
            tile_aged(groups_[g], s.groups[g], s.length, length);
    s.length = length;
}

void KvCache::tile(Group& group, Kept& kept, int64_t length) {
    auto& [max_blocks, pool] = group.classes[0];
    const int64_t period = int64_t(kept.table.size()) - blocks_for(kept.first);
    while (int64_t(kept.table.size()) < blocks_for(length)) {
        const int32_t from = kept.table[kept.table.size() - period];
        if (group.window) give_back(group, kept, int64_t(kept.table.size()) + 1 - max_blocks);
        const int32_t own = pool.take();  // may be the block just given back, whose rows are still intact
        if (own != from) pool.copy(from, own);
        kept.table.push_back(own);
    }
}

}  // namespace slimrt
