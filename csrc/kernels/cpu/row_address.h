// Where a row of a plane is.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/backend.h"

namespace slimrt::cpu {

/// `n` rows, row_bytes apart.
struct RowRun {
    const std::byte* data;
    int64_t n;
};

/// The rows from `position` on that lie together, up to `end`.
inline RowRun rows_at(const Rows& rows, const int32_t* table, int64_t position, int64_t end) {
    if (rows.block_tokens == 0) return {rows.base + (position - rows.first) * rows.row_bytes, end - position};
    const int64_t in_block = position % rows.block_tokens;
    const std::byte* block = rows.base + table[position / rows.block_tokens] * rows.block_stride;
    return {block + in_block * rows.row_bytes, std::min(rows.block_tokens - in_block, end - position)};
}

inline std::byte* slot_address(const Slots& slots, int64_t slot) {
    if (slots.block_tokens == 0) return slots.base + slot * slots.row_bytes;
    return slots.base + slot / slots.block_tokens * slots.block_stride +
           slot % slots.block_tokens * slots.row_bytes;
}

}  // namespace slimrt::cpu
