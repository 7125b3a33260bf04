#include "cache/kv_cache.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace slimrt {

namespace {
int64_t blocks_for(int64_t tokens) { return (tokens + KvCache::kBlockTokens - 1) / KvCache::kBlockTokens; }
}  // namespace

KvCache::KvCache(Backend& backend, std::vector<Format> formats, int64_t n_ctx, int n_seqs)
    : backend_(backend), n_ctx_(n_ctx) {
    constexpr int64_t kMostTokens = 1 << 28;  // slots are int32, with room to spare
    if (blocks_for(n_ctx) > kMostTokens / kBlockTokens / n_seqs)
        fail(ErrorCode::argument, "a cache of ", n_ctx, " tokens x ", n_seqs, " sequences, in blocks of ",
             kBlockTokens, ", is more than the ", kMostTokens, " tokens slimrt can address");
    const int64_t n_blocks = blocks_for(n_ctx) * n_seqs;
    for (Format& format : formats) {
        Layer layer;
        for (const Plane& plane : format) {
            layer.plane_offset.push_back(layer.row_bytes * kBlockTokens);
            layer.row_bytes += head_bytes(plane.type, plane.width / plane.heads).total() * plane.heads;
        }
        layer.format = std::move(format);
        layer.pool = backend.alloc(MemoryKind::cache, layer.row_bytes * kBlockTokens * n_blocks, "cache");
        layers_.push_back(std::move(layer));
    }
    users_.assign(n_blocks, 0);
    for (int64_t b = n_blocks; b-- > 0;) free_.push_back(int32_t(b));
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
    sequences_[next_] = {};
    return next_++;
}

void KvCache::release(int sequence) {
    for (const int32_t block : find(sequence).blocks) drop_block(block);
    sequences_.erase(sequence);
}

int KvCache::fork(int sequence) {
    Sequence copy = find(sequence);
    const Sequence& twin = sequences_[next_] = std::move(copy);
    for (const int32_t block : twin.blocks) ++users_[block];
    return next_++;
}

void KvCache::truncate(int sequence, int64_t length) {
    Sequence& s = find(sequence);
    if (length < 0 || length > s.length)
        fail(ErrorCode::argument, "cannot truncate a sequence of ", s.length, " tokens to ", length);
    s.length = length;
    while (int64_t(s.blocks.size()) > blocks_for(length)) {
        drop_block(s.blocks.back());
        s.blocks.pop_back();
    }
}

int64_t KvCache::length(int sequence) const { return find(sequence).length; }
const int32_t* KvCache::table(int sequence, int) const { return find(sequence).blocks.data(); }

void KvCache::require_room(std::span<const std::pair<int, int64_t>> growth) const {
    int64_t blocks = 0;
    std::map<int32_t, int> left;  // sequences that will have stopped sharing a block
    for (const auto& [id, n] : growth) {
        const Sequence& s = find(id);
        if (s.length + n > n_ctx_)
            fail(ErrorCode::context_overflow, "the context is full: ", s.length, " tokens are cached and ", n,
                 " more do not fit in n_ctx ", n_ctx_, ". Raise n_ctx (--ctx) or truncate");
        blocks += blocks_for(s.length + n) - int64_t(s.blocks.size());
        if (n == 0 || s.length % kBlockTokens == 0) continue;
        // A shared tail is copied before it is written to; the last to share it keeps it.
        const int32_t tail = s.blocks[s.length / kBlockTokens];
        if (users_[tail] - left[tail] > 1) ++blocks, ++left[tail];
    }
    if (blocks > int64_t(free_.size()))
        fail(ErrorCode::context_overflow, "the cache has ", free_.size(), " free blocks of ", kBlockTokens,
             " tokens and ", blocks, " are needed. Raise n_seqs or n_ctx, or free sequences");
}

void KvCache::reserve(int sequence, int64_t n) {
    Sequence& s = find(sequence);
    if (n > 0 && s.length % kBlockTokens) {
        int32_t& tail = s.blocks[s.length / kBlockTokens];
        if (users_[tail] > 1) {  // copy on write
            const int32_t own = take_block();
            copy_block(tail, own);
            drop_block(tail);
            tail = own;
        }
    }
    while (int64_t(s.blocks.size()) < blocks_for(s.length + n)) s.blocks.push_back(take_block());
}

void KvCache::add_slots(int sequence, int, int64_t n, std::vector<int32_t>& slots) const {
    const Sequence& s = find(sequence);
    for (int64_t p = s.length; p < s.length + n; ++p)
        slots.push_back(s.blocks[p / kBlockTokens] * kBlockTokens + int32_t(p % kBlockTokens));
}

void KvCache::commit(int sequence, int64_t n) { find(sequence).length += n; }

int32_t KvCache::take_block() {
    if (free_.empty()) fail(ErrorCode::context_overflow, "the cache has no free block");
    const int32_t block = free_.back();
    free_.pop_back();
    users_[block] = 1;
    return block;
}

void KvCache::drop_block(int32_t block) {
    if (--users_[block] == 0) free_.push_back(block);
}

void KvCache::copy_block(int32_t from, int32_t to) {
    for (const Layer& layer : layers_) {
        const size_t bytes = layer.row_bytes * kBlockTokens;
        std::byte* pool = layer.pool.data.get();
        backend_.upload(Tensor(pool + to * bytes, DType::F32, 1, 0), pool + from * bytes, bytes);
    }
}

Rows KvCache::plane(int layer, int plane) const {
    const Layer& l = layers_[layer];
    return {.base = l.pool.data.get() + l.plane_offset[plane],
            .dtype = l.format[plane].type,
            .width = l.format[plane].width,
            .heads = l.format[plane].heads,
            .block_stride = l.row_bytes * kBlockTokens,
            .block_tokens = kBlockTokens};
}

std::vector<Rows> KvCache::rows(int layer) const {
    std::vector<Rows> views;
    for (size_t p = 0; p < layers_[layer].format.size(); ++p) views.push_back(plane(layer, int(p)));
    return views;
}

Slots KvCache::slots(int layer, int plane, Tensor slots) const {
    const Rows rows = this->plane(layer, plane);
    return {.base = layers_[layer].pool.data.get() + layers_[layer].plane_offset[plane],
            .dtype = rows.dtype,
            .width = rows.width,
            .heads = rows.heads,
            .block_stride = rows.block_stride,
            .block_tokens = rows.block_tokens,
            .slots = slots};
}

/// visit(elements or scales of one head of one plane in one block, bytes), in a fixed order.
template <class Visit>
void KvCache::visit_rows(const Sequence& s, Visit visit) const {
    for (const Layer& l : layers_)
        for (size_t p = 0; p < l.format.size(); ++p) {
            const HeadBytes bytes = head_bytes(l.format[p].type, l.format[p].width / l.format[p].heads);
            for (int64_t first = 0; first < s.length; first += kBlockTokens) {
                const size_t block = s.blocks[first / kBlockTokens];
                const int64_t n = std::min<int64_t>(kBlockTokens, s.length - first);
                std::byte* head = l.pool.data.get() + block * l.row_bytes * kBlockTokens + l.plane_offset[p];
                for (int h = 0; h < l.format[p].heads; ++h, head += bytes.total() * kBlockTokens) {
                    visit(head, n * bytes.elements);
                    if (bytes.scales) visit(head + kBlockTokens * bytes.elements, n * bytes.scales);
                }
            }
        }
}

std::vector<std::byte> KvCache::save(int sequence) const {
    std::vector<std::byte> out;
    visit_rows(find(sequence), [&](std::byte* rows, size_t bytes) {
        out.resize(out.size() + bytes);
        backend_.download(out.data() + out.size() - bytes, Tensor(rows, DType::F32, 1, 0), bytes);
    });
    return out;
}

int KvCache::restore(std::span<const std::byte> bytes, int64_t length) {
    size_t expected = 0;
    for (const Layer& l : layers_) expected += l.row_bytes * length;
    if (length < 0 || bytes.size() != expected)
        fail(ErrorCode::format, "saved rows of ", length, " tokens need ", expected, " bytes, the data has ",
             bytes.size());
    const int id = create();
    const std::pair<int, int64_t> growth{id, length};
    try {
        require_room({&growth, 1});
    } catch (...) {
        release(id);
        throw;
    }
    reserve(id, length);
    commit(id, length);
    size_t at = 0;
    visit_rows(find(id), [&](std::byte* rows, size_t n) {
        backend_.upload(Tensor(rows, DType::F32, 1, 0), bytes.data() + at, n);
        at += n;
    });
    return id;
}

void KvCache::tile(int sequence, int64_t length) {
    Sequence& s = find(sequence);
    if (s.length == 0 || s.length % kBlockTokens || length % kBlockTokens || length < s.length)
        fail(ErrorCode::argument, "cannot tile a sequence of ", s.length, " tokens to ", length,
             ": both must be multiples of ", kBlockTokens, ", and it must grow");
    const std::pair<int, int64_t> growth{sequence, length - s.length};
    require_room({&growth, 1});
    for (size_t from = 0; int64_t(s.blocks.size()) < blocks_for(length); ++from) {
        s.blocks.push_back(take_block());
        copy_block(s.blocks[from], s.blocks.back());
    }
    s.length = length;
}

}  // namespace slimrt
