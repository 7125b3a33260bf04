// Where the tensors of a model are kept: in the mapped file, or in memory of the backend.
#pragma once

#include <functional>
#include <string>

#include "model/weights.h"

namespace slimrt {

/// The type in which weights are held on a backend that multiplies `native` ones: `together` rows, which may
/// be of several matrices, are used at once. On the CPU rows side by side if there are such, else as in the
/// file, else another type that holds the same, or f16.
DType held_type(DType type, int64_t together, const std::function<bool(DType)>& native);

/// What it allocates the weights own.
class WeightMemory {
  public:
    WeightMemory(Backend& backend, Weights& weights) : backend_(&backend), w_(weights) {}
    /// What follows is kept for this backend.
    void set_backend(Backend& backend) { backend_ = &backend; }

    /// Where the file is mapped; on a device a copy.
    Tensor in_place(const Tensor& t);
    /// As held_type() says.
    Tensor hold(const std::string& name, const Tensor& t, DType dtype);
    Tensor own(DType dtype, int64_t rows, int64_t cols, MemoryKind kind, const std::string& name);
    /// A few rows at a time: raw, as f32, as they are kept.
    Tensor unpacked(const std::string& name, const Tensor& t, DType dtype);

  private:
    /// The same bits, 16 rows side by side.
    Tensor interleaved(const std::string& name, const Tensor& t, DType dtype);
    /// The same numbers in another type.
    Tensor repacked(const std::string& name, const Tensor& t, DType dtype);

    Backend* backend_;
    Weights& w_;
};

}  // namespace slimrt
