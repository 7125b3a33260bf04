// Where a row of a plane is.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/backend.h"

namespace slimrt::cpu {

/// One head of `n` rows that lie together: elements `stride` bytes apart, scales side by side.
struct HeadRun {
    const std::byte *data, *scales;
    size_t stride;
    int64_t n;
};

/// The rows from `position` on that lie together, up to `end`.
inline HeadRun rows_at(const Rows& rows, const int32_t* table, int64_t position, int64_t end, int head) {
    if (rows.block_tokens == 0) {
        return {rows.base + (position - rows.first) * rows.row_bytes, nullptr, rows.row_bytes,
                end - position};
    }
    const HeadBytes bytes = head_bytes(rows.dtype, rows.head_dim());
    const int64_t row = position % rows.block_tokens;
    const std::byte* data = rows.base + table[position / rows.block_tokens] * rows.block_stride +
                            head * bytes.total() * rows.block_tokens;
    return {data + row * bytes.elements, data + rows.block_tokens * bytes.elements + row * bytes.scales,
            bytes.elements, std::min(rows.block_tokens - row, end - position)};
}

/// Fresh rows are dense rows of f32.
inline Rows fresh_rows(const Tensor& fresh, const AttentionSequence& sequence) {
    Rows rows;
    rows.base = fresh.row(sequence.query);
    rows.width = static_cast<int>(fresh.cols);
    rows.row_bytes = fresh.stride;
    rows.first = sequence.position;
    return rows;
}

/// Where head `head` of a slot is written.
struct HeadSlot {
    std::byte *data, *scales;
};
inline HeadSlot slot_address(const Slots& slots, int64_t slot, int head) {
    if (slots.block_tokens == 0) return {slots.base + slot * slots.row_bytes, nullptr};
    const HeadBytes bytes = head_bytes(slots.dtype, slots.width / slots.heads);
    const int64_t row = slot % slots.block_tokens;
    std::byte* data = slots.base + slot / slots.block_tokens * slots.block_stride +
                      head * bytes.total() * slots.block_tokens;
    return {data + row * bytes.elements, data + slots.block_tokens * bytes.elements + row * bytes.scales};
}

}  // namespace slimrt::cpu
