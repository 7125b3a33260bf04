// A backend, and tensors in its memory: what single operations are tried and timed on.
#pragma once

#include <memory>
#include <vector>

#include "kernels/backend.h"

namespace slimrt::bench {

/// Tensors live as long as this does.
class Arrays {
  public:
    explicit Arrays(std::shared_ptr<Backend> backend)
        : backend_(std::move(backend)), counted_(backend_->sparse_counts()) {}
    Backend& backend() const { return *backend_; }
    Backend* operator->() const { return backend_.get(); }

    Tensor put(const void* from, DType dtype, int64_t rows, int64_t cols) {
        const Tensor to = space(dtype, rows, cols);
        backend_->upload(to, from, to.bytes());
        return to;
    }
    Tensor zeros(int64_t rows, int64_t cols) { return space(DType::F32, rows, cols); }

    /// Since these arrays are there: others had the backend before.
    SparseCounts sparse_counts() const {
        const SparseCounts now = backend_->sparse_counts();
        return {now.rows - counted_.rows, now.skipped - counted_.skipped};
    }

  private:
    Tensor space(DType dtype, int64_t rows, int64_t cols) {
        buffers_.push_back(backend_->alloc(MemoryKind::scratch, rows * row_bytes(dtype, cols), "an array"));
        return Tensor(buffers_.back().data.get(), dtype, rows, cols);
    }

    std::shared_ptr<Backend> backend_;
    SparseCounts counted_;
    std::vector<Buffer> buffers_;
};

}  // namespace slimrt::bench
