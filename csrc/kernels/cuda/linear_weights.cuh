// Weights as they are stored (kernels/cpu/blocks.h), prepared for mma: codes become f16 integers, exactly, by
// way of the bits of 1024 + code; scales are applied in f32, to sums or to a tile of many tokens.
//
// A row is taken a chunk of k at a time. Its bytes are copied to shared memory as they are: rows of blocks of
// 18, 34 or 210 bytes begin anywhere, so pieces of 16 bytes are copied from the multiple of 16 before the
// first. A group of 32 is read as two halves `s` of 16, of which member m of four lanes has 4: elements 16 s
// + 4 m ...
#pragma once

#include "kernels/cuda/linear_codes.cuh"
#include "kernels/cuda/linear_job.cuh"

namespace slimrt::cuda {

constexpr int kPiece = 16;

/// F16 and BF16, elements in their order.
struct F16Weight {
    static constexpr int kChunk = 128, kChunkBytes = 256;
    static constexpr int kScales = 0;  // none
    static constexpr bool kMins = false, kBf16 = false;
    static constexpr int kUnit = 2;  // alignment of rows in bytes
    /// Rows in shared memory are an odd multiple of it apart, against bank conflicts.
    static constexpr int kRowUnit = 32;

    static size_t row_bytes(int k) { return size_t(k) * 2; }
    static __device__ uint2 codes(const unsigned char* row, int group, int s, int member) {
        const unsigned char* p = row + 2 * (group * kGroup + 16 * s + 4 * member);
        if (reinterpret_cast<uintptr_t>(p) % 8 == 0) return *reinterpret_cast<const uint2*>(p);
        return {word_at<2>(p), word_at<2>(p + 4)};
    }
};
struct Bf16Weight : F16Weight {
    static constexpr bool kBf16 = true;
};

/// fn(W()) for the type of weights; false, without a call, for any other type.
template <class Fn>
bool with_weight(DType dtype, const Fn& fn) {
    switch (dtype) {
        case DType::F16:
            return fn(F16Weight()), true;
        case DType::BF16:
            return fn(Bf16Weight()), true;
        case DType::Q4_0:
            return fn(Q4_0Weight()), true;
        case DType::Q4_1:
            return fn(Q4_1Weight()), true;
        case DType::Q5_0:
            return fn(Q5_0Weight()), true;
        case DType::Q5_1:
            return fn(Q5_1Weight()), true;
        case DType::Q8_0:
            return fn(Q8_0Weight()), true;
        case DType::Q2_K:
            return fn(Q2_KWeight()), true;
        case DType::Q3_K:
            return fn(Q3_KWeight()), true;
        case DType::Q4_K:
            return fn(Q4_KWeight()), true;
        case DType::Q5_K:
            return fn(Q5_KWeight()), true;
        case DType::Q6_K:
            return fn(Q6_KWeight()), true;
        case DType::IQ4_NL:
            return fn(IQ4_NLWeight()), true;
        case DType::IQ4_XS:
            return fn(IQ4_XSWeight()), true;
        case DType::MXFP4:
            return fn(MXFP4Weight()), true;
        case DType::TQ2_0:
            return fn(TQ2_0Weight()), true;
        case DType::IQ2_N:
            return fn(IQ2_NWeight()), true;
        case DType::IQ3_XXS_N:
            return fn(IQ3_XXS_NWeight()), true;
        case DType::IQ3_S_N:
            return fn(IQ3_S_NWeight()), true;
        default:
            return false;
    }
}

/// Pieces of a row's chunk, with what may come before it; bytes from row to row in shared memory.
template <class W>
constexpr int kPieces = (W::kChunkBytes + kPiece - W::kUnit + kPiece - 1) / kPiece;
template <class W>
constexpr int kRowSpace = ((kPieces<W> * kPiece + W::kRowUnit - 1) / W::kRowUnit | 1) * W::kRowUnit;

/// Starts the copy of bytes [offset, offset + kChunkBytes) of the tile's next `rows` rows, as far as they
/// exist, zeros beyond a row's end; for thread `index` of `count`.
template <class W>
__device__ inline void stage_rows(unsigned char* to, const Job& job, const Tile& tile, int rows,
                                  size_t offset, size_t row_bytes, int index, int count) {
    const int at_once = count / kPieces<W>, there = min(rows, job.parts[tile.part].rows - tile.row);
    const int piece = index % kPieces<W>, wanted = int(min(row_bytes - offset, size_t(W::kChunkBytes)));
    int row = index / kPieces<W>;
    if (row >= at_once) return;
    const unsigned char* begin = weight_row(job, tile, tile.row + row) + offset;
    const size_t step = at_once * job.parts[tile.part].stride;
    to += row * kRowSpace<W> + piece * kPiece;
    if ((reinterpret_cast<uintptr_t>(job.parts[tile.part].weight) | offset | job.parts[tile.part].stride |
         wanted) %
            kPiece ==
        0) {
        begin += piece * kPiece < wanted ? piece * kPiece : 0;
        for (; row < there; row += at_once) {
            copy16(to, begin, piece * kPiece < wanted);
            begin += step;
            to += at_once * kRowSpace<W>;
        }
        return;
    }
    for (; row < there; row += at_once) {
        const int before = int(reinterpret_cast<uintptr_t>(begin) % kPiece), at = piece * kPiece - before;
        const int bytes = max(0, min(wanted - at, kPiece));
        copy_part_of_16(to, begin + (bytes ? at : -before), bytes);
        begin += step;
        to += at_once * kRowSpace<W>;
    }
}

/// Where such a row begins. Missing rows may hold anything.
template <class W>
__device__ inline const unsigned char* staged_row(const unsigned char* staged, const Job& job,
                                                  const Tile& tile, int row, size_t offset) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(weight_row(job, tile, tile.row + row));
    return staged + row * kRowSpace<W> + (begin + offset) % kPiece;
}

}  // namespace slimrt::cuda
