// Stored rows as kernels see them (Rows in kernels/backend.h), and where one of them is.
#pragma once

#include <cassert>

#include "kernels/backend.h"
#include "kernels/cuda/row_types.cuh"

namespace slimrt::cuda {

struct RowsView {
    const unsigned char* base = nullptr;
    DType dtype = DType::F32;
    int head_dim = 0;
    int head_elements = 0;  // bytes of a head of a row
    int head_scales = 0;    // of its scales; with scale_tokens: of the scales of so many rows
    int dense_head = 0;     // from head to head of a dense row with several
    bool paged = false;     // in blocks of kBlockTokens rows
    int scale_tokens = 0;
    size_t head_block = 0;  // bytes of a head in a block
    size_t row_bytes = 0, block_stride = 0;
    int64_t first = 0;

    RowsView() = default;
    explicit RowsView(const Rows& rows)
        : base(reinterpret_cast<const unsigned char*>(rows.base)),
          dtype(rows.dtype),
          head_dim(rows.width ? rows.head_dim() : 0),
          paged(rows.block_tokens != 0),
          scale_tokens(rows.scale_tokens),
          row_bytes(rows.row_bytes),
          block_stride(rows.block_stride),
          first(rows.first) {
        assert(rows.block_tokens == 0 || rows.block_tokens == kBlockTokens);
        const HeadBytes bytes = head_bytes(rows.dtype, head_dim);
        head_elements = static_cast<int>(bytes.elements);
        head_scales = static_cast<int>(bytes.scales);
        dense_head = rows.heads > 1 ? head_elements : 0;
        if (scale_tokens) head_scales = static_cast<int>(head_bytes(rows.dtype, 1).scales) * head_dim;
        head_block = head_bytes(rows.dtype, head_dim, rows.block_tokens, scale_tokens).total();
    }
};

/// One head of one row.
struct HeadRow {
    const unsigned char *data, *scales;
};

/// Row `row` of a block.
__device__ inline HeadRow row_in(const RowsView& rows, const unsigned char* block, int row, int head) {
    const unsigned char* const data = block + head * rows.head_block;
    const unsigned char* const scales = data + kBlockTokens * rows.head_elements;
    const int of = rows.scale_tokens ? row / rows.scale_tokens : row;
    return {data + row * rows.head_elements, scales + of * rows.head_scales};
}

/// The block of a position, and its row there; by a constant, since other divisions take some 40
/// instructions.
__device__ inline const unsigned char* block_of(const RowsView& rows, const int32_t* table,
                                                int64_t position) {
    return rows.base + table[static_cast<uint64_t>(position) / kBlockTokens] * rows.block_stride;
}
__device__ inline int row_in_block(int64_t position) {
    return static_cast<int>(static_cast<uint64_t>(position) % kBlockTokens);
}

__device__ inline HeadRow row_at(const RowsView& rows, const int32_t* table, int64_t position, int head) {
    if (!rows.paged)
        return {rows.base + (position - rows.first) * rows.row_bytes + head * rows.dense_head, nullptr};
    return row_in(rows, block_of(rows, table, position), row_in_block(position), head);
}

/// The scale of a column.
template <class Row>
__device__ inline typename Row::Scale scale_of(const RowsView& rows, const HeadRow& row, int column) {
    if constexpr (Row::kScaled) {
        const int of = rows.scale_tokens ? column : Row::kGroup ? column / Row::kGroup : 0;
        return reinterpret_cast<const typename Row::Scale*>(row.scales)[of];
    } else {
        return {};
    }
}

/// Element `column` of a head, of any type that a cache row may have.
__device__ inline float element_of(const RowsView& rows, const HeadRow& row, int column) {
    return with_row_type(rows.dtype, [&]<class Row>(Row) {
        return Row::number(Row::code(row.data, column, rows.head_dim), scale_of<Row>(rows, row, column));
    });
}

}  // namespace slimrt::cuda
