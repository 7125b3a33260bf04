// Activations of one forward pass: a bump allocator over one buffer. Without a buffer it only measures,
// which is how the planner learns the size the real one gets.
#pragma once

#include <algorithm>

#include "kernels/backend.h"

namespace slimrt {

class Scratch {
  public:
    /// Measures only: its tensors must not be read.
    Scratch() = default;
    Scratch(Backend& backend, size_t bytes)
        : buffer_(backend.alloc(MemoryKind::scratch, bytes, "activations")), base_(buffer_.data.get()) {}

    Tensor take(DType dtype, int64_t rows, int64_t cols) {
        Tensor t(base_ + used_, dtype, rows, cols);
        used_ += (t.bytes() + kAlign - 1) / kAlign * kAlign;
        peak_ = std::max(peak_, used_);
        if (buffer_.data && used_ > buffer_.bytes) fail_overflow();
        return t;
    }
    Tensor f32(int64_t rows, int64_t cols) { return take(DType::F32, rows, cols); }
    Tensor i32(int64_t n) { return take(DType::I32, 1, n); }
    size_t peak() const { return peak_; }

    /// Gives back, at the end of a block, what was taken inside it.
    class Scope {
      public:
        explicit Scope(Scratch& scratch) : scratch_(scratch), used_(scratch.used_) {}
        ~Scope() { scratch_.used_ = used_; }
        Scope(const Scope&) = delete;
        Scope& operator=(const Scope&) = delete;

      private:
        Scratch& scratch_;
        size_t used_;
    };

  private:
    static constexpr size_t kAlign = 64;
    [[noreturn]] void fail_overflow() const;

    Buffer buffer_;
    std::byte* base_ = reinterpret_cast<std::byte*>(uintptr_t(1) << 20);  // never followed
    size_t used_ = 0, peak_ = 0;
};

}  // namespace slimrt
