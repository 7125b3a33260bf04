// Planes of cache rows outside of any cache.
#pragma once

#include <algorithm>
#include <random>
#include <span>
#include <vector>

#include "cache/kept_means.h"
#include "core/error.h"
#include "kernels/backend.h"

namespace slimrt::bench {

/// A plane of stored rows in blocks that lie shuffled in memory.
struct StoredRows {
    Buffer pool;
    std::vector<int32_t> table;
    Rows rows;

    StoredRows(Backend& backend, int64_t n, int width, int heads, DType dtype, int scale_tokens = 0) {
        if (width % heads) fail(ErrorCode::argument, width, " columns are not ", heads, " heads");
        const int64_t n_blocks = (n + kBlockTokens - 1) / kBlockTokens;
        for (int32_t b = 0; b < n_blocks; ++b) table.push_back(b);
        std::shuffle(table.begin(), table.end(), std::mt19937(7));
        if (scale_tokens < 0 || (scale_tokens && kBlockTokens % scale_tokens))
            fail(ErrorCode::argument, scale_tokens, " tokens do not divide a block of ", kBlockTokens);
        const size_t bytes = head_bytes(dtype, width / heads, kBlockTokens, scale_tokens).total() * heads;
        pool = backend.alloc(MemoryKind::cache, bytes * n_blocks, "rows");
        rows = {.base = pool.data.get(),
                .dtype = dtype,
                .width = width,
                .heads = heads,
                .block_stride = bytes,
                .block_tokens = kBlockTokens,
                .scale_tokens = scale_tokens};
    }
    StoredRows(Backend& backend, Tensor from, int heads, DType dtype)
        : StoredRows(backend, from.rows, int(from.cols), heads, dtype) {
        store(backend, from, 0);
    }

    /// Row i of `from` becomes the row of position first + i.
    void store(Backend& backend, Tensor from, int64_t first) {
        with_slots(backend, first, from.rows, [&](const Slots& to) { backend.store(from, to); });
    }
    /// The rows [begin, end) of `from` become rows of the positions that they have there.
    void recode(Backend& backend, const StoredRows& from, int64_t begin, int64_t end) {
        with_slots(backend, begin, end - begin,
                   [&](const Slots& to) { backend.recode(from.rows, from.table.data(), begin, end, to); });
    }

  private:
    /// use(slots of n positions from `first` on), if there are any.
    template <class Use>
    void with_slots(Backend& backend, int64_t first, int64_t n, const Use& use) {
        std::vector<int32_t> slots;
        for (int64_t i = first; i < first + n; ++i)
            slots.push_back(table[i / kBlockTokens] * kBlockTokens + int32_t(i % kBlockTokens));
        if (n <= 0) return;
        const Buffer there = backend.alloc(MemoryKind::scratch, slots.size() * sizeof(int32_t), "slots");
        const Tensor in_order(there.data.get(), DType::I32, 1, n);
        backend.upload(in_order, slots.data(), in_order.bytes());
        use({.base = pool.data.get(),
             .dtype = rows.dtype,
             .width = rows.width,
             .heads = rows.heads,
             .block_stride = rows.block_stride,
             .block_tokens = kBlockTokens,
             .slots = in_order,
             .scale_tokens = rows.scale_tokens});
    }
};

/// What a cache keeps of values that attention spares: the means of the whole stretches of sequences.
class MeansOfValues {
  public:
    MeansOfValues(Backend& backend, std::span<ValueTerm> values, std::span<AttentionSequence> sequences)
        : of_sequences_(sequences.size()) {
        Format planes;
        for (const ValueTerm& term : values) planes.push_back({"values", term.stored.width, 1, DType::F32});
        int64_t n = 0;
        for (const AttentionSequence& sequence : sequences) n += sequence.end / kStretchRows;
        kept_ = KeptMeans({{&backend, planes}}, n);
        for (size_t i = 0; i < sequences.size(); ++i) {
            kept_.grow(of_sequences_[i], sequences[i].end);
            sequences[i].means = of_sequences_[i];
        }
        for (size_t p = 0; p < values.size(); ++p) values[p].stored.means = kept_.of(0, int(p));
    }

  private:
    KeptMeans kept_;
    std::vector<std::vector<int32_t>> of_sequences_;
};

}  // namespace slimrt::bench
