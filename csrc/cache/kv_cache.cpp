#include "cache/kv_cache.h"

#include <algorithm>
#include <cassert>

#include "core/error.h"

namespace slimrt {

namespace {

int64_t blocks_for(int64_t tokens) { return (tokens + kBlockTokens - 1) / kBlockTokens; }

/// The most blocks that so many neighbouring rows lie in.
int64_t blocks_across(int64_t rows) { return (rows + kBlockTokens - 2) / kBlockTokens + 1; }

}  // namespace

KvCache::KvCache(Backend& backend, const std::vector<LayerRows>& layers, int64_t n_ctx, int n_seqs,
                 int64_t longest_step)
    : backend_(backend), n_ctx_(n_ctx) {
    constexpr int64_t kMostTokens = 1 << 28;  // slots are int32, with room to spare
    std::vector<int64_t> windows;
    std::vector<std::vector<Format>> formats;
    for (const auto& [format, window] : layers) {
        const auto known = std::ranges::find(windows, window);
        const int group = int(known - windows.begin());
        if (known == windows.end()) {
            windows.push_back(window);
            formats.emplace_back();
        }
        where_.push_back({group, int(formats[group].size())});
        formats[group].push_back(format);
    }
    for (size_t g = 0; g < windows.size(); ++g) {
        const int64_t all = blocks_for(n_ctx), rows = windows[g] - 1 + std::min(longest_step, n_ctx),
                      blocks = windows[g] ? std::min(all, blocks_across(rows)) : all;
        if (blocks > kMostTokens / kBlockTokens / n_seqs)
            fail(ErrorCode::argument, "a cache of ", n_ctx, " tokens x ", n_seqs, " sequences, in blocks of ",
                 kBlockTokens, ", is more than the ", kMostTokens, " tokens slimrt can address");
        groups_.push_back({windows[g], blocks, BlockPool(backend, std::move(formats[g]), blocks * n_seqs)});
    }
}

int64_t KvCache::max_rows(int layer) const {
    return std::min(n_ctx_, groups_[group_of(layer)].max_blocks * kBlockTokens);
}

KvCache::Sequence& KvCache::find(int sequence) {
    const auto it = sequences_.find(sequence);
    if (it == sequences_.end()) fail(ErrorCode::argument, "there is no sequence ", sequence);
    return it->second;
}
const KvCache::Sequence& KvCache::find(int sequence) const {
    return const_cast<KvCache*>(this)->find(sequence);
}

int KvCache::create() {
    sequences_[next_].groups.resize(groups_.size());
    return next_++;
}

void KvCache::release(int sequence) {
    truncate(sequence, 0);
    sequences_.erase(sequence);
}

int KvCache::fork(int sequence) {
    Sequence copy = find(sequence);
    for (size_t g = 0; g < groups_.size(); ++g)
        for (const int32_t block : copy.groups[g].table)
            if (block >= 0) groups_[g].pool.share(block);
    sequences_[next_] = std::move(copy);
    return next_++;
}

void KvCache::truncate(int sequence, int64_t length) {
    Sequence& s = find(sequence);
    if (length < 0 || length > s.length)
        fail(ErrorCode::argument, "cannot truncate a sequence of ", s.length, " tokens to ", length);
    for (size_t g = 0; g < groups_.size() && length > 0; ++g)
        if (const int64_t first = s.groups[g].first, window = groups_[g].window;
            begin(int(g), length) < first)
            fail(ErrorCode::argument, "cannot truncate a sequence of ", s.length, " tokens to ", length,
                 ": layers with a window of ", window, " tokens have given back the rows before position ",
                 first, ", which a text shorter than ", first + window - 1,
                 " tokens needs. Truncate to no less than that, or to 0, and append the tokens again");
    for (size_t g = 0; g < groups_.size(); ++g) {
        auto& [table, first] = s.groups[g];
        for (; int64_t(table.size()) > blocks_for(length); table.pop_back())
            if (table.back() >= 0) groups_[g].pool.drop(table.back());
        if (length == 0) first = 0;
    }
    s.length = length;
}

bool KvCache::can_truncate(int sequence, int64_t length) const {
    const Sequence& s = find(sequence);
    if (length <= 0 || length > s.length) return length == 0;
    for (size_t g = 0; g < groups_.size(); ++g)
        if (begin(int(g), length) < s.groups[g].first) return false;
    return true;
}

const int32_t* KvCache::table(int sequence, int group) const {
    return find(sequence).groups[group].table.data();
}

int64_t KvCache::begin(int group, int64_t length) const {
    const int64_t window = groups_[group].window;
    return window ? std::max<int64_t>(0, length - window + 1) : 0;
}

/// The most free blocks that growing takes meanwhile: new blocks, less those that a sequence gives back for
/// them, which are free if no other shares them.
int64_t KvCache::blocks_taken(int group, Growth growth) const {
    const auto& [window, max_blocks, pool] = groups_[group];
    int64_t taken = 0, most = 0;
    std::map<int32_t, int> left;  // sequences that will have stopped sharing a block
    for (const auto& [id, n] : growth) {
        const Sequence& s = find(id);
        const Kept& kept = s.groups[group];
        const int64_t n_old = int64_t(kept.table.size()), end = blocks_for(s.length + n);
        const auto leave_shared = [&, &pool = pool](int64_t i) {  // false: it is not, so it is free then
            const int32_t block = kept.table[i];
            return pool.users(block) - left[block] > 1 && ++left[block];
        };
        // A shared tail is copied before it is written to; the last to share it keeps it.
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

void KvCache::require_free(const Group& group, int64_t blocks) const {
    if (blocks <= group.pool.n_free()) return;
    const std::string whose = group.window ? concat(" for the layers with a window of ", group.window) : "";
    fail(ErrorCode::context_overflow, "the cache has ", group.pool.n_free(), " free blocks of ", kBlockTokens,
         " tokens", whose, " and ", blocks, " are needed. Raise n_seqs", group.window ? "" : " or n_ctx",
         ", or free sequences");
}

void KvCache::require_room(Growth growth) const {
    for (const auto& [id, n] : growth)
        if (const int64_t length = find(id).length; length + n > n_ctx_)
            fail(ErrorCode::context_overflow, "the context is full: ", length, " tokens are cached and ", n,
                 " more do not fit in n_ctx ", n_ctx_, ". Raise n_ctx (--ctx) or truncate");
    for (size_t g = 0; g < groups_.size(); ++g) require_free(groups_[g], blocks_taken(int(g), growth));
}

/// Gives back the blocks before the front-th.
void KvCache::give_back(Group& group, Kept& kept, int64_t front) {
    for (int64_t i = kept.front(); i < front; ++i) {
        group.pool.drop(kept.table[i]);
        kept.table[i] = -1;
        kept.first = (i + 1) * kBlockTokens;
    }
}

void KvCache::reserve(int sequence, int64_t n) {
    Sequence& s = find(sequence);
    const int64_t end = blocks_for(s.length + n);
    for (size_t g = 0; g < groups_.size(); ++g) {
        Group& group = groups_[g];
        Kept& kept = s.groups[g];
        give_back(group, kept, end - group.max_blocks);
        assert(kept.first <= begin(int(g), s.length));
        if (n > 0 && s.length % kBlockTokens) {
            int32_t& tail = kept.table[s.length / kBlockTokens];
            if (group.pool.users(tail) > 1) {  // copy on write
                const int32_t own = group.pool.take();
                group.pool.copy(tail, own);
                group.pool.drop(tail);
                tail = own;
            }
        }
        while (int64_t(kept.table.size()) < end) kept.table.push_back(group.pool.take());
    }
}

void KvCache::add_slots(int sequence, int group, int64_t n, std::vector<int32_t>& slots) const {
    const Sequence& s = find(sequence);
    const std::vector<int32_t>& table = s.groups[group].table;
    for (int64_t p = s.length; p < s.length + n; ++p)
        slots.push_back(table[p / kBlockTokens] * kBlockTokens + int32_t(p % kBlockTokens));
}

std::vector<Rows> KvCache::rows(int layer) const {
    std::vector<Rows> views;
    for (size_t p = 0; p < format(layer).size(); ++p)
        views.push_back(pool(layer).rows(where_[layer].index, int(p)));
    return views;
}

Slots KvCache::slots(int layer, int plane, Tensor slots) const {
    return pool(layer).slots(where_[layer].index, plane, slots);
}

std::vector<std::byte> KvCache::save(int sequence) const {
    const Sequence& s = find(sequence);
    std::vector<std::byte> out;
    for (size_t g = 0; g < groups_.size(); ++g)
        groups_[g].pool.visit_rows(
            s.groups[g].table, begin(int(g), s.length), s.length, [&](std::byte* rows, size_t bytes) {
                out.resize(out.size() + bytes);
                backend_.download(out.data() + out.size() - bytes, Tensor(rows, DType::F32, 1, 0), bytes);
            });
    return out;
}

int KvCache::restore(std::span<const std::byte> bytes, int64_t length) {
    if (length < 0 || length > n_ctx_)
        fail(ErrorCode::format, "saved rows of ", length, " tokens: n_ctx is ", n_ctx_);
    size_t expected = 0;
    for (size_t g = 0; g < groups_.size(); ++g)
        expected += groups_[g].pool.row_bytes() * size_t(length - begin(int(g), length));
    if (bytes.size() != expected)
        fail(ErrorCode::format, "saved rows of ", length, " tokens need ", expected, " bytes, the data has ",
             bytes.size());
    for (size_t g = 0; g < groups_.size(); ++g)
        require_free(groups_[g], blocks_for(length) - begin(int(g), length) / kBlockTokens);
    const int id = create();
    Sequence& s = find(id);
    s.length = length;
    size_t at = 0;
    for (size_t g = 0; g < groups_.size(); ++g) {
        auto& [table, first] = s.groups[g];
        first = begin(int(g), length);
        table.assign(first / kBlockTokens, -1);
        while (int64_t(table.size()) < blocks_for(length)) table.push_back(groups_[g].pool.take());
        groups_[g].pool.visit_rows(table, first, length, [&](std::byte* rows, size_t n) {
            backend_.upload(Tensor(rows, DType::F32, 1, 0), bytes.data() + at, n);
            at += n;
        });
    }
    return id;
}

void KvCache::tile(int sequence, int64_t length) {
    Sequence& s = find(sequence);
    const auto whole = [](const Kept& kept) { return int64_t(kept.table.size()) - blocks_for(kept.first); };
    if (s.length == 0 || s.length % kBlockTokens || length % kBlockTokens || length < s.length ||
        std::ranges::any_of(s.groups, [&](const Kept& kept) { return whole(kept) == 0; }))
        fail(ErrorCode::argument, "cannot tile a sequence of ", s.length, " tokens to ", length,
             ": both must be multiples of ", kBlockTokens, ", and it must grow");
    const std::pair<int, int64_t> growth{sequence, length - s.length};
    require_room({&growth, 1});
    for (size_t g = 0; g < groups_.size(); ++g) {
        auto& [window, max_blocks, pool] = groups_[g];
        Kept& kept = s.groups[g];
        for (const int64_t period = whole(kept); int64_t(kept.table.size()) < blocks_for(length);) {
            const int32_t from = kept.table[kept.table.size() - period];
            give_back(groups_[g], kept, int64_t(kept.table.size()) + 1 - max_blocks);
            const int32_t own = pool.take();  // may be the one given back, whose rows are still there
            if (own != from) pool.copy(from, own);
            kept.table.push_back(own);
        }
    }
    s.length = length;
}

}  // namespace slimrt
