// Single operations timed: weight products over many matrices, and the reading that bounds them.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "bench/arrays.h"
#include "kernels/cpu/access.h"

namespace slimrt::bench {

/// Prefetches for reading memory without arithmetic: into all caches, or past L1. Which is faster, by a tenth
/// or so, differs from CPU to CPU.
inline constexpr cpu::Access kReads[] = {{cpu::Hint::t0, false, 4 << 10}, {cpu::Hint::t1, false, 16 << 10}};

/// Reads a buffer far larger than the caches, in huge pages where the system grants them; GB/s of the best
/// of two passes each way. n_threads 0: default_threads(). Throws Error{argument} for fewer, and for no
/// megabyte.
double read_bandwidth(int n_threads, int megabytes);

/// Reads memory on a backend's threads, and does nothing with it.
void read_all(Backend& backend, const void* data, size_t bytes, cpu::Access access);

/// Weights of one type, matrix after matrix of rows x cols.
struct Matrices {
    std::span<const uint8_t> bytes;
    DType type;
    int64_t rows, cols;

    size_t of_one() const { return size_t(rows) * row_bytes(type, cols); }
    int64_t count() const { return int64_t(bytes.size() / of_one()); }
};

/// Seconds of each pass over all matrices: x [tokens, cols] times one after the other, and, for tokens 0, the
/// mere reading of them on n_threads, the faster way. Throws Error{argument} where the backend has no such
/// product.
std::vector<double> time_linear(Arrays& arrays, const Matrices& weights, int64_t tokens, int n_threads,
                                int passes);

/// Seconds of every copy of so many bytes inside a backend's memory, as `calls` of them one after another
/// take.
std::vector<double> time_copy(Arrays& arrays, size_t bytes, int repetitions, int calls);

/// Multiply-adds a second, in 1e9, of dot products in registers on one thread, as a product with this type of
/// weight and many tokens does them on an instruction set ("": the best); the best of five.
double dot_peak(DType type, const std::string& isa);

}  // namespace slimrt::bench
