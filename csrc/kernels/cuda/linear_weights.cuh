// Weights as they are stored (kernels/cpu/blocks.h), made ready for mma: codes become f16 integers, exactly,
// by way of the bits of 1024 + code; their scales are applied to sums, or to the tile of many tokens, in f32.
//
// A row is taken a chunk of k at a time: its bytes go to shared memory as they are (rows of blocks of 18, 34
// or 210 bytes start anywhere, so 16-byte pieces are copied from the multiple of 16 before the first), and a
// group of 32 is read as two halves `s` of 16, of which member m of four lanes has 4: elements 16 s + 4 m ...
#pragma once

#include "kernels/cuda/linear_job.cuh"
#include "kernels/cuda/ptx.cuh"

namespace slimrt::cuda {

constexpr int kGroup = 32;
constexpr int kPiece = 16;

// Numbers in shared memory at multiples of 2 bytes.
__device__ inline uint32_t half_word(const unsigned char* p) { return *reinterpret_cast<const uint16_t*>(p); }
__device__ inline uint32_t word(const unsigned char* p) { return half_word(p) | half_word(p + 2) << 16; }
__device__ inline float scale_at(const unsigned char* p) { return from_f16(uint16_t(half_word(p))); }

/// Four codes as two words of f16: 1024 + bytes 0, 2 and 1, 3 of `bytes`, plus `offset` (f16, twice).
__device__ inline uint2 codes_of_bytes(uint32_t bytes, uint32_t offset) {
    return {add_f16x2(__byte_perm(bytes, 0x64646464, 0x4240), offset),
            add_f16x2(__byte_perm(bytes, 0x64646464, 0x4341), offset)};
}
/// The same of the low or high nibbles, with what is added to 1024 + code or to 64 + code.
__device__ inline uint2 codes_of_nibbles(uint32_t bytes, bool high, uint32_t offset, uint32_t offset_high) {
    const uint32_t odd = bytes >> 8, sixteenth = 0x2c002c00, kilo = 0x64006400;
    if (high)
        return {multiply_add_f16x2(and_or(bytes, 0x00f000f0, kilo), sixteenth, offset_high),
                multiply_add_f16x2(and_or(odd, 0x00f000f0, kilo), sixteenth, offset_high)};
    return {add_f16x2(and_or(bytes, 0x000f000f, kilo), offset),
            add_f16x2(and_or(odd, 0x000f000f, kilo), offset)};
}

/// F16 and BF16, in the order they have.
struct PlainWeight {
    static constexpr int kChunk = 128, kChunkBytes = 256;
    static constexpr int kScales = 0;  // of a chunk of a row; no scales
    static constexpr bool kMins = false, kBrain = false;
    static constexpr int kRowUnit = 32;  // an odd multiple of it keeps reads of rows off each other's banks

    static size_t row_bytes(int k) { return size_t(k) * 2; }
    static __device__ uint2 codes(const unsigned char* row, int group, int s, int member) {
        const unsigned char* p = row + 2 * (group * kGroup + 16 * s + 4 * member);
        if (reinterpret_cast<uintptr_t>(p) % 8 == 0) return *reinterpret_cast<const uint2*>(p);
        return {word(p), word(p + 4)};
    }
};
struct BrainWeight : PlainWeight {
    static constexpr bool kBrain = true;
};

/// What the quantised types share. codes(): elements 0, 2 and 1, 3 of the four.
template <int block, int bytes>
struct CodedWeight {
    static constexpr int kChunk = 256, kChunkBytes = 256 / block * bytes;
    static constexpr int kScales = 8;
    static constexpr bool kMins = false, kBrain = false;
    static constexpr int kRowUnit = 16;

    static size_t row_bytes(int k) { return size_t(k) / block * bytes; }
};

struct Q8_0Weight : CodedWeight<32, 34> {  // scale, 32 codes
    static constexpr float kLargest = 128;
    static __device__ uint2 codes(const unsigned char* row, int group, int s, int member) {
        return codes_of_bytes(word(row + 34 * group + 2 + 16 * s + 4 * member) ^ 0x80808080, 0xe480e480);
    }
    static __device__ void scales(const unsigned char* row, float (&scale)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) scale[i] = scale_at(row + 34 * i);
    }
};

struct Q4_0Weight : CodedWeight<32, 18> {  // scale, nibbles: elements 0 to 15 low, 16 to 31 high
    static constexpr float kLargest = 8;
    static __device__ uint2 codes(const unsigned char* row, int group, int s, int member) {
        return codes_of_nibbles(word(row + 18 * group + 2 + 4 * member), s == 1, 0xe408e408, 0xd480d480);
    }
    static __device__ void scales(const unsigned char* row, float (&scale)[8]) {
#pragma unroll
        for (int i = 0; i < 8; ++i) scale[i] = scale_at(row + 18 * i);
    }
};

struct Q4_KWeight : CodedWeight<256, 144> {  // at multiples of 4 bytes
    static constexpr bool kMins = true;
    static constexpr float kLargest = 15;
    static __device__ uint2 codes(const unsigned char* row, int group, int s, int member) {
        const unsigned char* p = row + 16 + group / 2 * 32 + 16 * s + 4 * member;
        return codes_of_nibbles(*reinterpret_cast<const uint32_t*>(p), group % 2 == 1, 0xe400e400,
                                0xd400d400);
    }
    static __device__ void scales(const unsigned char* row, float (&scale)[8]) {
        const uint32_t* const words = reinterpret_cast<const uint32_t*>(row);
        const uint32_t a = words[1], c = words[3];
        const uint32_t codes[2] = {a & kSix, (c & kFour) | (a >> 2 & kUpper)};
        const float d = scale_at(row);
#pragma unroll
        for (int i = 0; i < 8; ++i) scale[i] = d * float(codes[i / 4] >> i % 4 * 8 & 255);
    }
    /// The codes of the groups' minima as f16; they are to be multiplied by what is returned.
    static __device__ float minima(const unsigned char* row, uint4& codes) {
        const uint32_t* const words = reinterpret_cast<const uint32_t*>(row);
        const uint32_t b = words[2], c = words[3], kilo = 0x64646464, minus = 0xe400e400;
        const uint32_t first = b & kSix, last = (c >> 4 & kFour) | (b >> 2 & kUpper);
        codes = {add_f16x2(__byte_perm(first, kilo, 0x4140), minus),
                 add_f16x2(__byte_perm(first, kilo, 0x4342), minus),
                 add_f16x2(__byte_perm(last, kilo, 0x4140), minus),
                 add_f16x2(__byte_perm(last, kilo, 0x4342), minus)};
        return scale_at(row + 2);
    }

  private:
    static constexpr uint32_t kSix = 0x3f3f3f3f, kFour = 0x0f0f0f0f, kUpper = 0x30303030;
};

struct Q6_KWeight : CodedWeight<256, 210> {
    static constexpr int kScales = 16;  // of 16 elements each
    static constexpr float kLargest = 32;
    static __device__ uint2 codes(const unsigned char* row, int group, int s, int member) {
        const int half = group / 4, part = group % 4, at = 16 * s + 4 * member;
        const uint32_t low = word(row + half * 64 + part % 2 * 32 + at) >> part / 2 * 4 & 0x0f0f0f0f;
        const uint32_t high = word(row + 128 + half * 32 + at) >> part * 2 & 0x03030303;
        return codes_of_bytes(low | high << 4, 0xe420e420);
    }
    static __device__ void scales(const unsigned char* row, float (&scale)[16]) {
        const float d = scale_at(row + 208);
#pragma unroll
        for (int i = 0; i < 16; i += 2) {
            const uint32_t two = half_word(row + 192 + i);
            scale[i] = d * float(int8_t(two & 255));
            scale[i + 1] = d * float(int8_t(two >> 8));
        }
    }
};

/// Bytes between two rows of chunks in shared memory, with what may come before a row's first.
template <class W>
constexpr int kPieces = (W::kChunkBytes + kPiece - 2 + kPiece - 1) / kPiece;
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
