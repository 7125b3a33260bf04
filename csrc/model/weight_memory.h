// Where the tensors of a model are kept: in the mapped file, or in memory of the backend.
#pragma once

#include <functional>
#include <string>

#include "model/weights.h"

namespace slimrt {

/// The type in which a matrix of a file is held on a backend that multiplies `native` ones: on the CPU rows
/// side by side if `together` of them, which are used at once, are whole sixteens; else as in the file, else
/// another type that holds the same, or f16. Tokens' rows beside an output of their own, which are only
/// looked up, stay as they are where the backend can.
DType held_type(const GgufFile& file, const std::string& name, int64_t together,
                const std::function<bool(DType)>& native);

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
