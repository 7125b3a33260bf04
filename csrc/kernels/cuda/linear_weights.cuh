// Weights as they are stored (kernels/cpu/blocks.h), made ready for mma: codes become f16 integers, exactly,
// by way of the bits of 1024 + code; their scales are applied to sums, or to the tile of many tokens, in f32.
//
// A row is taken a chunk of k at a time: its bytes go to shared memory as they are (rows of blocks of 18, 34
// or 210 bytes start anywhere, so 16-byte pieces are copied from the multiple of 16 before the first), and a
// group of 32 is read as two halves `s` of 16, of which member m of four lanes has 4: elements 16 s + 4 m ...
#pragma once

#include "kernels/cuda/linear_codes.cuh"
#include "kernels/cuda/linear_job.cuh"

namespace slimrt::cuda {

constexpr int kPiece = 16;

/// F16 and BF16, in the order they have.
struct PlainWeight {
    static constexpr int kChunk = 128, kChunkBytes = 256;
    static constexpr int kScales = 0;  // of a chunk of a row; no scales
    static constexpr bool kMins = false, kBrain = false;
    static constexpr int kUnit = 2;      // rows are at multiples of so many bytes
    static constexpr int kRowUnit = 32;  // an odd multiple of it keeps reads of rows off each other's banks

    static size_t row_bytes(int k) { return size_t(k) * 2; }
    static __device__ uint2 codes(const unsigned char* row, int group, int s, int member) {
        const unsigned char* p = row + 2 * (group * kGroup + 16 * s + 4 * member);
        if (reinterpret_cast<uintptr_t>(p) % 8 == 0) return *reinterpret_cast<const uint2*>(p);
        return {word_at<2>(p), word_at<2>(p + 4)};
    }
};
struct BrainWeight : PlainWeight {
    static constexpr bool kBrain = true;
};

/// fn(W()) for the type of weights; false, and no call, where it is none of these.
template <class Fn>
bool with_weight(DType dtype, const Fn& fn) {
    switch (dtype) {
        case DType::F16:
            return fn(PlainWeight()), true;
        case DType::BF16:
            return fn(BrainWeight()), true;
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

/// Bytes between two rows of chunks in shared memory, with what may come before a row's first.
template <class W>
constexpr int kPieces = (W::kChunkBytes + kPiece - W::kUnit + kPiece - 1) / kPiece;
template <class W>
constexpr int kRowSpace = ((kPieces<W> * kPiece + W::kRowUnit - 1) / W::kRowUnit | 1) * W::kRowUnit;

/// Starts the copy of bytes [offset, offset + kChunkBytes) of as many as there are of the tile's next `rows`
/// rows, zeros beyond a row's end; thread `index` of `count`.
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

/// Where a row so copied begins. Rows that there are not hold anything.
template <class W>
__device__ inline const unsigned char* staged_row(const unsigned char* staged, const Job& job,
                                                  const Tile& tile, int row, size_t offset) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(weight_row(job, tile, tile.row + row));
    return staged + row * kRowSpace<W> + (begin + offset) % kPiece;
}

}  // namespace slimrt::cuda
