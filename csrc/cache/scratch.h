// Activations of one forward pass: a bump allocator that takes from both ends of one buffer. Without a buffer
// it only measures, which is how the planner learns the buffer's size.
#pragma once

#include <algorithm>

#include "kernels/backend.h"

namespace slimrt {

class Scratch {
  public:
    /// Measures only: its tensors must not be read.
    Scratch() : arena_(std::make_shared<Arena>()) {}
    Scratch(Backend& backend, size_t bytes) : Scratch() {
        arena_->buffer = backend.alloc(MemoryKind::scratch, bytes, "activations");
        arena_->base = arena_->buffer.data.get();
        arena_->end = arena_->base + bytes / kAlign * kAlign;
    }

    /// The other end of the same buffer, for tensors that outlive scopes of this end.
    Scratch other_end() const {
        Scratch other = *this;
        other.end_ = 1 - end_;
        return other;
    }

    Tensor take(DType dtype, int64_t rows, int64_t cols) {
        Tensor t(nullptr, dtype, rows, cols);
        const size_t bytes = (t.bytes() + kAlign - 1) / kAlign * kAlign;
        t.data = end_ == 0 ? arena_->base + arena_->used[0] : arena_->end - arena_->used[1] - bytes;
        arena_->used[end_] += bytes;
        const size_t used = arena_->used[0] + arena_->used[1];
        arena_->peak = std::max(arena_->peak, used);
        if (arena_->buffer.data && used > arena_->buffer.bytes) fail_overflow();
        return t;
    }
    Tensor f32(int64_t rows, int64_t cols) { return take(DType::F32, rows, cols); }
    Tensor i32(int64_t n) { return take(DType::I32, 1, n); }
    size_t peak() const { return arena_->peak; }

    /// Frees at its end what was taken from this end of the buffer within it.
    class Scope {
      public:
        explicit Scope(Scratch& scratch)
            : used_(scratch.arena_->used[scratch.end_]), before_(used_), arena_(scratch.arena_) {}
        ~Scope() { used_ = before_; }
        Scope(const Scope&) = delete;
        Scope& operator=(const Scope&) = delete;

      private:
        size_t& used_;
        size_t before_;
        std::shared_ptr<void> arena_;
    };

  private:
    static constexpr size_t kAlign = 64;
    struct Arena {
        Buffer buffer;
        std::byte* base = reinterpret_cast<std::byte*>(uintptr_t(1) << 20);  // never dereferenced
        std::byte* end = reinterpret_cast<std::byte*>(uintptr_t(1) << 46);   // likewise
        size_t used[2] = {0, 0}, peak = 0;                                   // used: from each end
    };
    [[noreturn]] void fail_overflow() const;

    std::shared_ptr<Arena> arena_;
    int end_ = 0;
};

/// Where the next chunk after the one at `first` begins, of n rows that are taken `most` at a time. On a dry
/// backend the first chunk and the last two are enough: those between need no more memory.
inline int64_t next_chunk(int64_t first, int64_t n, int64_t most, bool dry) {
    const int64_t next = first + most;
    return dry ? std::max(next, (n - 1) / most * most - most) : next;
}

}  // namespace slimrt
