// One head's rows of a block, as what they are. For the units compiled once per ISA.
#pragma once

#include "core/dtype.h"
#include "kernels/cpu/attention_tiles.h"

namespace slimrt::cpu::SLIMRT_ISA {
namespace {

constexpr int64_t kAhead = 10 << 10;  // bytes from where memory is called for to where it is read

/// Calls for what will be read: the heads from `head` on, then what follows from `then` on. The CPU foresees
/// no page but the one being read. Into the first level and only there, since every byte is read once: a line
/// on its way from memory and again from the second level takes two of the few places for lines on their way.
class Prefetch {
  public:
    Prefetch(const BlockRows& rows, int64_t head, int64_t n_heads, const void* then)
        : at_(static_cast<const char*>(rows.data) + head * rows.head_stride),
          end_(at_ + (n_heads - head) * static_cast<int64_t>(rows.head_stride)),
          then_(static_cast<const char*>(then)) {
        at_ += end_ - at_ < kAhead ? end_ - at_ : kAhead;
    }

    /// As the next `bytes` are read.
    void some(int64_t bytes) {
        if (at_ >= end_ && then_) {
            at_ = then_ + (at_ - end_);
            end_ = then_ + kAhead;
            then_ = nullptr;
        }
        const char* const stop = at_ + bytes < end_ || then_ ? at_ + bytes : end_;
        for (; at_ < stop; at_ += kLine) __builtin_prefetch(at_, 0, 0);
    }

  private:
    static constexpr int64_t kLine = 64;
    const char *at_, *end_, *then_;
};

/// One head's rows and their scales: one a row, or none.
template <class Rows>
struct Head {
    Rows rows;
    const float* scales;
};

template <class Stored, class Fn>
void with_width(const BlockRows& rows, const char* data, const float* scales, const Fn& fn) {
    if (rows.dim == 64 && rows.stride == 64 * sizeof(Stored))
        return fn(Head<PackedRows<Stored, 64>>{{reinterpret_cast<const Stored*>(data)}, scales});
    if (rows.dim == 128 && rows.stride == 128 * sizeof(Stored))
        return fn(Head<PackedRows<Stored, 128>>{{reinterpret_cast<const Stored*>(data)}, scales});
    fn(Head<RowsOf<Stored>>{{data, rows.stride}, scales});
}

/// Calls fn with a head's rows as what they are; Q4 is made f32 in scratch first.
template <class Fn>
void with_head(const BlockAttention& b, const BlockRows& rows, int64_t head, const Fn& fn) {
    const char* const data = static_cast<const char*>(rows.data) + head * rows.head_stride;
    const char* const beside = static_cast<const char*>(rows.scales) + head * rows.head_stride;
    const float* const scales = reinterpret_cast<const float*>(beside);
    switch (DType(rows.type)) {
        case DType::F16:
            return with_width<Half>(rows, data, nullptr, fn);
        case DType::BF16:
            return with_width<Brain>(rows, data, nullptr, fn);
        case DType::Q8:
            return with_width<Int8>(rows, data, scales, fn);
        case DType::FP8_E4M3:
            return with_width<E4M3>(rows, data, scales, fn);
        case DType::FP8_E5M2:
            return with_width<E5M2>(rows, data, nullptr, fn);
        case DType::Q4:
            load_head(rows.type, data, rows.stride, beside, b.n, rows.dim, 0, rows.dim, b.rows,
                      b.rows_stride);
            return fn(Head<RowsOf<float>>{{b.rows, b.rows_stride * sizeof(float)}, nullptr});
        default:
            return fn(Head<RowsOf<float>>{{data, rows.stride}, nullptr});
    }
}

/// s[i] *= scales[i], which lie anywhere.
inline void scale_rows(float* s, const float* scales, int64_t n) {
    int64_t i = 0;
    for (; i + lanes <= n; i += lanes) store(s + i, load(s + i) * load(scales + i));
    if (i < n) store_part(s + i, load_part(s + i, n - i) * load_part(scales + i, n - i), n - i);
}

}  // namespace
}  // namespace slimrt::cpu::SLIMRT_ISA
