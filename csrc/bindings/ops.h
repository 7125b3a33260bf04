// What the bindings of single operations share: NumPy arrays as tensors, and a backend to compute with.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bench/arrays.h"
#include "bindings/bindings.h"
#include "kernels/backend.h"

namespace slimrt {

using F32 = Array<const float>;
using U8 = Array<const uint8_t>;
using I32 = Array<const int32_t>;

/// open_backend() for one caller at a time. A backend that is given back keeps its threads for the next call
/// with the same arguments: tests make thousands.
std::shared_ptr<Backend> borrow_backend(const std::string& name, int n_threads);

/// A backend, and NumPy arrays in its memory for as long as this lives.
class Arrays : public bench::Arrays {
  public:
    explicit Arrays(const std::string& backend, int n_threads = 1)
        : bench::Arrays(borrow_backend(backend, n_threads)) {}

    /// A float32 array as a matrix of its last dimension.
    Tensor of(const F32& a) {
        const int64_t cols = int64_t(a.shape(a.ndim() - 1));
        return put(a.data(), DType::F32, int64_t(a.size()) / cols, cols);
    }
    Tensor of(const std::optional<F32>& a) {
        return a ? put(a->data(), DType::F32, 1, int64_t(a->size())) : Tensor{};
    }
    Tensor of(const I32& a) { return put(a.data(), DType::I32, 1, int64_t(a.size())); }
    Tensor of(const std::vector<int32_t>& a) { return put(a.data(), DType::I32, 1, int64_t(a.size())); }

    auto read(Tensor t) const {
        std::vector<float> data(t.rows * t.cols);
        backend().download(data.data(), t, t.bytes());
        return numpy_array(std::move(data), {size_t(t.rows), size_t(t.cols)});
    }
};

void bind_attention_ops(nb::module_& m);

}  // namespace slimrt
