// What the bindings of single operations share: NumPy arrays as tensors, and a backend to compute with.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "kernels/backend.h"

namespace slimrt {

using F32 = Array<const float>;
using U8 = Array<const uint8_t>;
using I32 = Array<const int32_t>;

inline std::unique_ptr<Backend> open_backend(const std::string& isa, int n_threads = 1) {
    return open_cpu_backend({.n_threads = n_threads, .isa = isa});
}

/// A float32 array as a matrix of its last dimension.
inline Tensor view(const F32& a) {
    const int64_t cols = int64_t(a.shape(a.ndim() - 1));
    return Tensor(const_cast<float*>(a.data()), DType::F32, int64_t(a.size()) / cols, cols);
}
inline Tensor view(const std::optional<F32>& a) {
    return a ? Tensor(const_cast<float*>(a->data()), DType::F32, 1, int64_t(a->size())) : Tensor{};
}
inline Tensor view(const I32& a) {
    return Tensor(const_cast<int32_t*>(a.data()), DType::I32, 1, int64_t(a.size()));
}

struct Result {
    std::vector<float> data;
    Tensor tensor;
    Result(int64_t rows, int64_t cols) : data(rows * cols), tensor(data.data(), DType::F32, rows, cols) {}
    explicit Result(Tensor from) : Result(from.rows, from.cols) {
        std::copy_n(from.f32(), data.size(), data.data());
    }
    auto array() { return numpy_array(std::move(data), {size_t(tensor.rows), size_t(tensor.cols)}); }
};

void bind_attention_ops(nb::module_& m);

}  // namespace slimrt
