// What one instruction set must provide: single-threaded kernels over rows. The sources linear.cpp,
// quant.cpp, elementwise.cpp and attention.cpp are compiled once per ISA, each time into a namespace of its
// own (SLIMRT_ISA), and export exactly one symbol: the table. They include no standard header with inline
// code, since an inline function shared with a baseline unit could be linked in its AVX-512 form.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace slimrt::cpu {

/// Products of stored weight rows with activation rows, for one weight type.
struct LinearKernel {
    uint32_t weight_type;  // DType
    int64_t least_tokens;  // of several kernels for a type, the first in the list that takes so few serves
    /// Bytes of one activation row of k elements once packed, and the packing (for f32 activations: a copy is
    /// not needed, pack is nullptr and x is read as it is).
    size_t (*packed_bytes)(int64_t k);
    void (*pack)(const float* x, int64_t k, void* out);
    /// out[t * out_stride + r] = w[r] . x[t], r < n_rows, t < n_tokens; strides of w and x in bytes, of out
    /// in floats.
    void (*product)(const void* w, size_t w_stride, int64_t n_rows, const void* x, size_t x_stride,
                    int64_t n_tokens, int64_t k, float* out, size_t out_stride);
};

/// The single-threaded kernels of one instruction set.
struct Isa {
    const char* name;
    const LinearKernel* linear;  // terminated by an entry whose product is nullptr
    /// The arithmetic that bounds products with this type of weight, for benchmarks: that many rounds of dot
    /// products of registers; returns the multiply-adds. `out` takes a vector, so that they happen.
    int64_t (*busy)(uint32_t type, int64_t rounds, float* out);

    /// Any readable type to f32 (type is a DType; n a multiple of its block).
    void (*unpack)(uint32_t type, const void* from, int64_t n, float* to);
    /// f32 to F32, F16 or BF16 (round to nearest even).
    void (*narrow)(uint32_t type, const float* from, int64_t n, void* to);

    void (*rms_norm)(const float* x, const float* weight, float eps, int64_t n, float* out);
    void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int64_t n,
                       float* out);
    /// One head's row; cs = cos, sin pairs of its position.
    void (*rope)(float* x, const float* cs, int64_t n_rot, bool interleaved);
    void (*activate)(uint32_t kind, float* x, int64_t n);  // kind: Activation
    void (*gate)(uint32_t kind, float* gate, const float* up, int64_t n);
    void (*add)(float* x, const float* y, int64_t n);

    /// Rows of F32, F16 or BF16 to f32; from_stride in bytes, to_stride in floats.
    void (*widen)(uint32_t type, const void* from, size_t from_stride, int64_t n_rows, int64_t n, float* to,
                  size_t to_stride);

    // One tile of attention: `n` rows of F32, F16 or BF16, `stride` bytes apart.

    /// scores[m * ld + i] (+)= scale * q[m] . rows[i]; q row m at q + m * q_stride, dim elements.
    void (*scores)(const float* q, size_t q_stride, int64_t n_q, uint32_t type, const void* rows,
                   size_t stride, int64_t n, int64_t dim, float scale, bool accumulate, float* out,
                   size_t ld);
    /// Online softmax of one row of a tile: given the running maximum and sum, replaces s by exp(s - max'),
    /// updates both, and returns the factor exp(max - max') for what was accumulated before: 0 at first, when
    /// the maximum is -inf.
    float (*softmax)(float* s, int64_t n, float* max, float* sum);
    /// out[m] = factor[m] * out[m] + sum_i p[m * ld + i] * rows[i], dim elements. Where factor[m] is 0,
    /// out[m] need not have been written before.
    void (*values)(const float* p, size_t ld, int64_t n_q, const float* factor, uint32_t type,
                   const void* rows, size_t stride, int64_t n, int64_t dim, float* out, size_t out_stride);
};

/// The tables in this build that this CPU can run, best first. Never empty.
const Isa* const* supported_isas(int* n);

}  // namespace slimrt::cpu
