// Stored rows as kernels see them (Rows in kernels/backend.h), and where one of them is.
#pragma once

#include "kernels/backend.h"
#include "kernels/cuda/numbers.cuh"

namespace slimrt::cuda {

struct RowsView {
    const unsigned char* base = nullptr;
    DType dtype = DType::F32;
    int head_dim = 0;
    int head_elements = 0, head_scales = 0;  // bytes of a head of a row
    int block_tokens = 0;                    // 0: dense
    size_t row_bytes = 0, block_stride = 0;
    int64_t first = 0;

    RowsView() = default;
    explicit RowsView(const Rows& rows)
        : base(reinterpret_cast<const unsigned char*>(rows.base)),
          dtype(rows.dtype),
          head_dim(rows.width ? rows.head_dim() : 0),
          block_tokens(rows.block_tokens),
          row_bytes(rows.row_bytes),
          block_stride(rows.block_stride),
          first(rows.first) {
        const HeadBytes bytes = head_bytes(rows.dtype, head_dim);
        head_elements = static_cast<int>(bytes.elements);
        head_scales = static_cast<int>(bytes.scales);
    }
};

/// One head of one row.
struct HeadRow {
    const unsigned char *data, *scales;
};

__device__ inline HeadRow row_at(const RowsView& rows, const int32_t* table, int64_t position, int head) {
    if (rows.block_tokens == 0) return {rows.base + (position - rows.first) * rows.row_bytes, nullptr};
    const int64_t row = position % rows.block_tokens;
    const unsigned char* const data =
        rows.base + table[position / rows.block_tokens] * rows.block_stride +
        static_cast<size_t>(head) * (rows.head_elements + rows.head_scales) * rows.block_tokens;
    return {data + row * rows.head_elements,
            data + rows.block_tokens * rows.head_elements + row * rows.head_scales};
}

/// Element `column` of a head, of any type that a cache row may have.
__device__ inline float element_of(const RowsView& rows, const HeadRow& row, int column) {
    constexpr int kGroup = 32;  // of Q4
    switch (rows.dtype) {
        case DType::F32:
            return reinterpret_cast<const float*>(row.data)[column];
        case DType::F16:
            return from_f16(reinterpret_cast<const uint16_t*>(row.data)[column]);
        case DType::BF16:
            return from_bf16(reinterpret_cast<const uint16_t*>(row.data)[column]);
        case DType::Q8:
            return reinterpret_cast<const int8_t*>(row.data)[column] *
                   *reinterpret_cast<const float*>(row.scales);
        case DType::FP8_E4M3:
            return from_f16(e4m3_to_f16(row.data[column])) * *reinterpret_cast<const float*>(row.scales);
        case DType::FP8_E5M2:
            return from_f16(e5m2_to_f16(row.data[column]));
        default: {  // Q4: a group of 32 (the last may be shorter) has its first half in the low nibbles
            const int group = column / kGroup, at = column % kGroup, left = rows.head_dim - group * kGroup;
            const int half = ((left < kGroup ? left : kGroup) + 1) / 2;
            const unsigned char byte = row.data[group * kGroup / 2 + (at < half ? at : at - half)];
            const uint16_t* const of_group = reinterpret_cast<const uint16_t*>(row.scales) + 2 * group;
            return from_f16(of_group[0]) * static_cast<float>(at < half ? byte & 15 : byte >> 4) +
                   from_f16(of_group[1]);
        }
    }
}

}  // namespace slimrt::cuda
