// What the copy engine of sm_90 is told of a tensor, of which one copy brings a box (copy_box in
// ptx_sm90.cuh).
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>

namespace slimrt::cuda {

/// A tensor of bytes in device memory, in rows of 128: its sizes, the bytes from one to the next of all
/// dimensions but the first, and how much of each a copy brings. In shared memory 16 bytes of row r are not
/// at i but at i ^ 16 (r % 8), so that 8 rows lie in all banks.
struct TensorBoxes {
    const void* base;
    std::array<uint64_t, 5> sizes;
    std::array<uint64_t, 4> strides;
    std::array<uint32_t, 5> box;
};

/// Throws Error{device}.
CUtensorMap tensor_map(const TensorBoxes& boxes);

}  // namespace slimrt::cuda
