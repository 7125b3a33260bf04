// Views of memory and its ownership: a Tensor is a view, a Buffer owns.
#pragma once

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/dtype.h"

namespace slimrt {

/// A view of `rows` rows of `cols` elements, `stride` bytes apart. All data of slimrt are such matrices: a
/// weight is [out, in] as in GGUF, an activation [tokens, width], a vector [1, n]. Heads are consecutive
/// columns. A default-constructed Tensor is "none" (converts to false).
struct Tensor {
    std::byte* data = nullptr;
    DType dtype = DType::F32;
    int64_t rows = 0, cols = 0;
    size_t stride = 0;

    Tensor() = default;
    Tensor(void* data, DType dtype, int64_t rows, int64_t cols)
        : data(static_cast<std::byte*>(data)),
          dtype(dtype),
          rows(rows),
          cols(cols),
          stride(row_bytes(dtype, cols)) {}

    explicit operator bool() const { return data != nullptr; }
    std::byte* row(int64_t i) const { return data + i * stride; }
    float* f32(int64_t i = 0) const { return reinterpret_cast<float*>(row(i)); }
    int32_t* i32(int64_t i = 0) const { return reinterpret_cast<int32_t*>(row(i)); }
    size_t bytes() const { return rows * stride; }

    /// Rows [first, first + n).
    Tensor rows_of(int64_t first, int64_t n) const {
        Tensor view = *this;
        view.data = row(first);
        view.rows = n;
        return view;
    }
    /// Reshapes each row to n rows; rows must have no gaps.
    Tensor split(int64_t n) const {
        assert(stride == row_bytes(dtype, cols) && cols % n == 0);
        return Tensor(data, dtype, rows * n, cols / n);
    }
    /// Columns [first, first + n); first must be a multiple of the type's block.
    Tensor cols_of(int64_t first, int64_t n) const {
        Tensor view = *this;
        view.data = data + row_bytes(dtype, first);
        view.cols = n;
        return view;
    }
};

/// Memory on one device, freed with its last owner.
struct Buffer {
    std::shared_ptr<std::byte> data;
    size_t bytes = 0;
};

}  // namespace slimrt
