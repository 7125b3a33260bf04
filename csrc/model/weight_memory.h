// Where a model's tensors are kept: in the mapped file, or in the backend's memory.
#pragma once

#include <functional>
#include <string>

#include "model/weights.h"

namespace slimrt {

/// The type in which a backend holds a matrix of the file; native: whether it multiplies a type. On the CPU
/// the interleaved type if `together`, the rows that are used at once, is a multiple of 16; else the file's
/// type, else another that holds the same numbers, else f16. A token embedding that is not the output, too,
/// is only looked up and stays as it is where the backend can read it.
DType held_type(const GgufFile& file, const std::string& name, int64_t together,
                const std::function<bool(DType)>& native);

/// Places tensors in memory; the weights own what it allocates.
class WeightMemory {
  public:
    WeightMemory(Backend& backend, Weights& weights) : backend_(&backend), w_(weights) {}
    /// Tensors that follow are kept for this backend.
    void set_backend(Backend& backend) { backend_ = &backend; }

    /// The tensor in the mapped file; on a device, a copy.
    Tensor in_place(const Tensor& t);
    /// The tensor in dtype, its held_type().
    Tensor hold(const std::string& name, const Tensor& t, DType dtype);
    Tensor own(DType dtype, int64_t rows, int64_t cols, MemoryKind kind, const std::string& name);
    /// Converted by way of f32, a few rows at a time.
    Tensor unpacked(const std::string& name, const Tensor& t, DType dtype, MemoryKind = MemoryKind::weights);

    /// A matrix [rows, cols] of f32 on the host in f16, each row divided by its largest magnitude, and these
    /// f32 [1, rows]. values: none on a dry backend.
    Tensor halved(const std::string& name, int64_t rows, int64_t cols, const Tensor* values, Tensor* scale);

  private:
    /// The same bits, 16 rows interleaved.
    Tensor interleaved(const std::string& name, const Tensor& t, DType dtype);
    /// The same numbers in another type.
    Tensor repacked(const std::string& name, const Tensor& t, DType dtype);

    Backend* backend_;
    Weights& w_;
};

}  // namespace slimrt
