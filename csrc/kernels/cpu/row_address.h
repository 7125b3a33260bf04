// Addresses of cached rows: where heads of a plane are within blocks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/backend.h"
#include "kernels/cpu/isa.h"

namespace slimrt::cpu {

/// One head of n consecutive rows: elements `stride` bytes apart, scales consecutive, one for each row or
/// (by_channel) one for each channel of all rows.
struct HeadRun {
    const std::byte *data, *scales;
    size_t stride;
    int64_t n;
    bool by_channel = false;
};

/// Offsets in bytes of a head of a row within its block.
struct HeadOffsets {
    size_t data, scales;
};
/// `plane`: Rows or Slots.
template <class Plane>
HeadOffsets offsets_in_block(const Plane& plane, int64_t row, int head) {
    const int dim = plane.width / plane.heads;
    if (plane.scale_tokens == 0) {
        const HeadBytes bytes = head_bytes(plane.dtype, dim);
        const size_t first = head * bytes.total() * plane.block_tokens;
        return {first + row * bytes.elements,
                first + plane.block_tokens * bytes.elements + row * bytes.scales};
    }
    const HeadBytes bytes = head_bytes(plane.dtype, dim, plane.block_tokens, plane.scale_tokens);
    const size_t first = head * bytes.total(), groups = plane.block_tokens / plane.scale_tokens;
    return {first + row * (bytes.elements / plane.block_tokens),
            first + bytes.elements + row / plane.scale_tokens * (bytes.scales / groups)};
}

/// The rows from `position` on that are consecutive in memory, up to `end`.
inline HeadRun rows_at(const Rows& rows, const int32_t* table, int64_t position, int64_t end, int head) {
    if (rows.block_tokens == 0) {
        const size_t column = rows.heads > 1 ? row_bytes(rows.dtype, head * rows.head_dim()) : 0;
        return {rows.base + (position - rows.first) * rows.row_bytes + column, nullptr, rows.row_bytes,
                end - position};
    }
    const int64_t row = position % rows.block_tokens;
    const std::byte* block = rows.base + table[position / rows.block_tokens] * rows.block_stride;
    const HeadOffsets at = offsets_in_block(rows, row, head);
    const int64_t together = rows.scale_tokens ? rows.scale_tokens : rows.block_tokens;
    return {block + at.data, block + at.scales, head_bytes(rows.dtype, rows.head_dim()).elements,
            std::min(together - row % together, end - position), rows.scale_tokens > 0};
}

/// Dequantises columns [first, first + n) of the rows of a run to f32, to_stride floats apart.
inline void load_run(const Isa& isa, const Rows& rows, const HeadRun& run, int64_t first, int64_t n,
                     float* to, size_t to_stride) {
    const auto load = run.by_channel ? isa.load_channels : isa.load_head;
    load(static_cast<uint32_t>(rows.dtype), run.data, run.stride, run.scales, run.n, rows.head_dim(), first,
         n, to, to_stride);
}

/// The rows of this step, which are dense f32.
inline Rows fresh_rows(const Tensor& fresh, const AttentionSequence& sequence) {
    Rows rows;
    rows.base = fresh.row(sequence.query);
    rows.width = static_cast<int>(fresh.cols);
    rows.row_bytes = fresh.stride;
    rows.first = sequence.position;
    return rows;
}

/// Where head `head` of a slot is stored.
struct HeadSlot {
    std::byte *data, *scales;
};
inline HeadSlot slot_address(const Slots& slots, int64_t slot, int head) {
    if (slots.block_tokens == 0) {
        const size_t column = row_bytes(slots.dtype, head * (slots.width / slots.heads));
        return {slots.base + slot * slots.row_bytes + column, nullptr};
    }
    std::byte* const block = slots.base + slot / slots.block_tokens * slots.block_stride;
    const HeadOffsets at = offsets_in_block(slots, slot % slots.block_tokens, head);
    return {block + at.data, block + at.scales};
}

}  // namespace slimrt::cpu
