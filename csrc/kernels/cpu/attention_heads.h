// The rows of one head in a block, with their element type. For the units compiled once per ISA.
#pragma once

#include "kernels/cpu/attention_tiles.h"
#include "kernels/cpu/stored.h"

namespace slimrt::cpu::SLIMRT_ISA {
namespace {

/// Prefetches the heads from `head` on in the order they are read, then the memory at next_region: hardware
/// prefetchers stop at the end of a page.
class Prefetch {
  public:
    Prefetch(const BlockAttention& b, const BlockRows& rows, int64_t n_heads, int64_t head,
             const void* next_region)
        : hint_(b.access.hint),
          ahead_(b.access.ahead),
          at_(static_cast<const char*>(rows.data) + head * rows.head_stride),
          end_(at_ + (n_heads - head) * static_cast<int64_t>(rows.head_stride)),
          next_region_(static_cast<const char*>(next_region)) {
        at_ += end_ - at_ < ahead_ ? end_ - at_ : ahead_;
    }

    /// Prefetches the next `bytes`, as many as are read meanwhile. Not inlined: it is called from everywhere.
    [[gnu::noinline]] void advance(int64_t bytes) {
        if (hint_ == Hint::none) return;
        if (at_ >= end_ && next_region_) {
            at_ = next_region_ + (at_ - end_);
            end_ = next_region_ + ahead_;
            next_region_ = nullptr;
        }
        const char* const stop = at_ + bytes < end_ || next_region_ ? at_ + bytes : end_;
        if (at_ >= stop) return;
        const int64_t whole = (stop - at_ + kLine - 1) / kLine * kLine;
        prefetch(at_, whole, hint_);
        at_ += whole;
    }

    /// The same in steps of `step` bytes for the caller to make, if it is not 0; what lies in the next region
    /// is prefetched at once.
    PrefetchSteps in_steps(int64_t bytes, int64_t step) {
        if (hint_ == Hint::none || step == 0 || at_ + bytes > end_) {
            advance(bytes);
            return {};
        }
        at_ += bytes;
        return {at_ - bytes, step, hint_};
    }

  private:
    static constexpr int64_t kLine = 64;
    Hint hint_;
    int64_t ahead_;
    const char *at_, *end_, *next_region_;
};

/// The rows of one head. scales: one for each row, or nullptr; group_scales: of channels, or of groups of
/// few-bit codes.
template <class Rows>
struct Head {
    Rows rows;
    const float* scales;
    const void* group_scales = nullptr;
};

template <class Rows>
constexpr bool is_codes = false;
template <int bits>
constexpr bool is_codes<CodeRows<bits>> = true;

/// Element types that may have a scale for each channel instead of each row.
template <class Rows>
constexpr bool has_channels = is_codes<Rows>;
template <>
constexpr bool has_channels<RowsOf<Int8>> = true;
template <>
constexpr bool has_channels<RowsOf<E4M3>> = true;

/// Whether heads of 64 and 128 columns have code of their own: of the most usual types alone, since it gains
/// nothing for others, and portable code is small instead.
template <class Stored>
constexpr bool has_widths = lanes * registers > 64 && (__is_same(Stored, Half) || RowsOf<Stored>::is_int8);

template <class Stored, class Fn>
void with_width(const BlockRows& rows, const char* data, const float* scales, const Fn& fn) {
    const RowsOf<Stored> any = {data, rows.stride};
    if constexpr (has_channels<RowsOf<Stored>>)
        if (rows.by_channel) return fn(Head<RowsOf<Stored>>{any, nullptr, scales});
    if constexpr (has_widths<Stored>) {
        if (rows.dim == 64 && rows.stride == 64 * sizeof(Stored))
            return fn(Head<PackedRows<Stored, 64>>{{reinterpret_cast<const Stored*>(data)}, scales});
        if (rows.dim == 128 && rows.stride == 128 * sizeof(Stored))
            return fn(Head<PackedRows<Stored, 128>>{{reinterpret_cast<const Stored*>(data)}, scales});
    }
    fn(Head<RowsOf<Stored>>{any, scales});
}

/// Whether codes of few bits can be read as stored: the head is whole groups.
inline bool reads_codes(const BlockRows& rows) { return rows.dim % StoredFew<4>::kGroup == 0; }

/// fn(Head) for one head: codes of few bits either as they are, or dequantised to scratch first.
template <class Fn>
void with_head(const BlockAttention& b, const BlockRows& rows, int64_t head, bool codes, const Fn& fn) {
    const char* const data = static_cast<const char*>(rows.data) + head * rows.head_stride;
    const char* const scales_of_head = static_cast<const char*>(rows.scales) + head * rows.head_stride;
    const float* const scales = reinterpret_cast<const float*>(scales_of_head);
    with_stored(rows.type, [&]<class Stored>(Stored) {
        using Code = typename Stored::Code;
        if constexpr (__is_same(Code, void)) {
            if (codes)
                return fn(Head<CodeRows<Stored::bits>>{
                    {reinterpret_cast<const uint8_t*>(data), rows.stride}, nullptr, scales_of_head});
            const auto load = rows.by_channel ? load_channels : load_head;
            load(rows.type, data, rows.stride, scales_of_head, b.n, rows.dim, 0, rows.dim, b.rows,
                 b.rows_stride);
            fn(Head<RowsOf<float>>{{b.rows, b.rows_stride * sizeof(float)}, nullptr});
        } else if constexpr (__is_same(Code, float)) {
            fn(Head<RowsOf<float>>{{data, rows.stride}, nullptr});
        } else {
            with_width<Code>(rows, data, Stored::scaled ? scales : nullptr, fn);
        }
    });
}

/// s[i] *= scales[i]; scales need not be aligned.
inline void scale_rows(float* s, const float* scales, int64_t n) {
    int64_t i = 0;
    for (; i + lanes <= n; i += lanes) store(s + i, load(s + i) * load(scales + i));
    if (i < n) store_part(s + i, load_part(s + i, n - i) * load_part(scales + i, n - i), n - i);
}

}  // namespace
}  // namespace slimrt::cpu::SLIMRT_ISA
