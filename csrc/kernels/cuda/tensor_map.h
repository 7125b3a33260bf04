// TMA descriptors of sm_90: a tensor, of which one copy loads a box (copy_box in ptx_sm90.cuh).
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>

namespace slimrt::cuda {

/// A tensor of bytes in device memory, in rows of 128: its sizes, the strides in bytes of all dimensions but
/// the first, and the box that a copy loads. In shared memory the 16 bytes at i of row r are at i ^ 16 (r %
/// 8), so that 8 rows have no bank conflicts (swizzled).
struct TensorBoxes {
    const void* base;
    std::array<uint64_t, 5> sizes;
    std::array<uint64_t, 4> strides;
    std::array<uint32_t, 5> box;
};

/// Throws Error{device}.
CUtensorMap tensor_map(const TensorBoxes& boxes);

}  // namespace slimrt::cuda
