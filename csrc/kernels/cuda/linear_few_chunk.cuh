// A chunk of a warp's rows times a chunk of its tokens, for linear_few.cu: the layout of a warp's shared
// memory, and the products. Columns of an mma are high and low parts of four tokens, so that one mma
// multiplies both; eight tokens take two.
#pragma once

#include "kernels/cuda/linear_few_x.cuh"

namespace slimrt::cuda {

/// The next rows of a tile, which a warp copies to shared memory chunk after chunk.
template <class W, int kRows>
struct RowCopies {
    const unsigned char* first;
    size_t stride;
    int there;  // rows that exist, of kRows

    __device__ RowCopies(const Job& job, const Tile& tile)
        : first(weight_row(job, tile, tile.row)),
          stride(job.parts[tile.part].stride),
          there(min(kRows, job.parts[tile.part].rows - tile.row)) {}

    /// How many bytes before a row's chunk its first piece of 16 begins.
    __device__ int before(int row, size_t offset) const {
        const uint32_t at = uint32_t(reinterpret_cast<uintptr_t>(first)) + row * uint32_t(stride);
        return int((at + uint32_t(offset)) % kPiece);
    }
    /// Copies bytes [offset, offset + kChunkBytes) of the rows, zeros beyond a row's end.
    __device__ void start(unsigned char* to, size_t offset, size_t row_bytes, int lane) const {
        constexpr bool kWhole = W::kChunkBytes % kPiece == 0;
        const int wanted = int(min(row_bytes - offset, size_t(W::kChunkBytes)));
        const bool alike = stride % kPiece == 0;  // rows are equally far from multiples of 16 bytes
        if (kWhole && alike && before(0, offset) == 0)
            copy<W::kChunkBytes / kPiece, true>(to, offset, wanted, lane);
        else if (alike)
            copy<kPieces<W>, true>(to, offset, wanted, lane);
        else
            copy<kPieces<W>, false>(to, offset, wanted, lane);
    }
    /// Where a copied row begins. Missing rows may hold anything.
    __device__ const unsigned char* staged(const unsigned char* from, int row, size_t offset) const {
        return from + row * kRowSpace<W> + before(row, offset);
    }

  private:
    /// Each lane copies a piece of 16 bytes, of as many rows at once as there are lanes for.
    template <int kEach, bool alike>
    __device__ void copy(unsigned char* to, size_t offset, int wanted, int lane) const {
        constexpr int kAtOnce = kWarp / kEach, kTurns = divide_up(kRows, kAtOnce);
        const int row = lane / kEach, at = lane % kEach * kPiece;
        if (row >= kAtOnce) return;
        const unsigned char* from = first + offset + row * stride;
        const uint32_t step = uint32_t(kAtOnce * stride);
        uint32_t low = uint32_t(reinterpret_cast<uintptr_t>(from));
        int skipped = int(low % kPiece), bytes = max(0, min(wanted + skipped - at, kPiece));
        if (alike) from += (bytes ? at : 0) - skipped;
        to += row * kRowSpace<W> + at;
#pragma unroll
        for (int i = 0; i < kTurns; ++i) {
            if (row + i * kAtOnce >= there) return;
            if (!alike) skipped = int(low % kPiece), bytes = max(0, min(wanted + skipped - at, kPiece));
            copy_part_of_16(to + i * kAtOnce * kRowSpace<W>,
                            alike ? from : from + ((bytes ? at : 0) - skipped), bytes);
            from += step;
            low += step;
        }
    }
};

/// The rows of the weight that a block takes at a time; with a gate half of them are of part 0, the gate, and
/// half of part 1, the up-projection.
template <class W, int kRows, bool kGated>
struct BlockRows {
    static constexpr int kEach = kGated ? kRows / 2 : kRows;
    Tile tile;
    RowCopies<W, kEach> own, other;

    __device__ BlockRows(const Job& job, int index)
        : tile(kGated ? Tile{0, 0, index * kEach} : tile_at(job, index, kRows)),
          own(job, tile),
          other(kGated ? RowCopies<W, kEach>(job, gated()) : own) {}
    __device__ Tile gated() const { return {1, 0, tile.row}; }

    __device__ void start(unsigned char* to, size_t offset, size_t row_bytes, int lane) const {
        own.start(to, offset, row_bytes, lane);
        if (kGated) other.start(to + kEach * kRowSpace<W>, offset, row_bytes, lane);
    }
    __device__ const unsigned char* staged(const unsigned char* from, int i, size_t offset) const {
        if (kGated && i >= kEach) return other.staged(from + kEach * kRowSpace<W>, i - kEach, offset);
        return own.staged(from, i, offset);
    }
};

/// Layout of a warp's shared memory, in bytes: scales and minima of the rows that are multiplied, stages of
/// rows, x.
template <class W, int kTiles, int kColumns>
struct Layout {
    static constexpr int kRows = 16 * kTiles, kTokens = 4 * kColumns;
    static constexpr int kMinimaAt = 4 * W::kScales * kRows;  // [kRows, kScales f16], after the scales
    static constexpr int kFactorAt = kMinimaAt + (W::kMins ? 2 * W::kScales * kRows : 0);
    static constexpr int kStagesAt = kFactorAt + (W::kMins ? 4 * kRows : 0);
    static constexpr int kStage = kRows * kRowSpace<W>;
};

/// What a warp's shared memory is used for.
struct Room {
    int stages;  // 1 or 2
    int kept;    // chunks of x, all of the warp's; 0: one, split anew for each tile

    template <class W, class L>
    __host__ __device__ constexpr int tokens_at() const {
        return L::kStagesAt + stages * L::kStage;
    }
    template <class W, class L>
    __host__ __device__ constexpr int bytes(int tokens) const {
        return tokens_at<W, L>() + tokens * (kept ? kept : 1) * TokenSpace<W>::kBytes;
    }
};

/// A lane's part of a warp's products: rows group, group + 8 (+ 16 ...) by tokens member (, member + 4).
template <int kTiles, int kColumns>
using Sums = float[kTiles][kColumns][2];

template <class W>
constexpr bool kSmallCodes = requires { W::small_scale(0); };

template <class W>
__device__ uint2 codes_of(const unsigned char* row, int group, int s, int member) {
    if constexpr (kSmallCodes<W>)
        return W::small_codes(row, group, s, member);
    else
        return W::codes(row, group, s, member);
}

/// Unpacks the scales and minima of a staged row.
template <class W, class L>
__device__ void unpack_scales(unsigned char* own, const unsigned char* row, int index) {
    float scale[W::kScales];
    W::scales(row, scale);
    if constexpr (kSmallCodes<W>) {
        for (int i = 0; i < W::kScales; ++i) scale[i] *= W::small_scale(i);
    }
    float4* const to = reinterpret_cast<float4*>(own) + index * (W::kScales / 4);
#pragma unroll
    for (int i = 0; i < W::kScales; i += 4) to[i / 4] = {scale[i], scale[i + 1], scale[i + 2], scale[i + 3]};
    if constexpr (W::kMins) {
        constexpr int kWords = W::kScales / 2;
        uint32_t codes[kWords];
        reinterpret_cast<float*>(own + L::kFactorAt)[index] = W::minima(row, codes);
        uint4* const out = reinterpret_cast<uint4*>(own + L::kMinimaAt) + index * kWords / 4;
#pragma unroll
        for (int i = 0; i < kWords; i += 4) out[i / 4] = {codes[i], codes[i + 1], codes[i + 2], codes[i + 3]};
    }
}

template <class W>
__device__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint2 b) {
    if constexpr (W::kBf16)
        multiply_add_bf16(d, a, b.x, b.y);
    else
        multiply_add_f16(d, a, b.x, b.y);
}

/// A chunk of rows times its tokens, before the tokens' powers of two.
template <class W, int kTiles, int kColumns>
struct Chunk {
    using L = Layout<W, kTiles, kColumns>;
    static constexpr int kQuad = 4;         // groups whose scales are read at once
    const unsigned char* rows[2 * kTiles];  // group, group + 8, group + 16, ...
    const unsigned char* own;               // the warp's memory
    const unsigned char* tokens[kColumns];  // of the lane's columns; beyond the last token the last again
    int group, member;

    /// Whether the lane's column is one of low parts.
    __device__ bool low() const { return group % 2; }

    /// sums += factors * (high + low), for rows group and group + 8 of a tile.
    static __device__ void fold(float (&sums)[2], const float (&d)[4], float upper, float lower) {
        sums[0] = fmaf(upper, d[0] + d[1], sums[0]);
        sums[1] = fmaf(lower, d[2] + d[3], sums[1]);
    }

    /// The minima's part: codes of groups times the sums of x.
    __device__ void fold_minima(Sums<kTiles, kColumns>& sums) const {
        constexpr int kWords = W::kScales / 2;
        const uint32_t* const codes = reinterpret_cast<const uint32_t*>(own + L::kMinimaAt) + member;
        const float* const factors = reinterpret_cast<const float*>(own + L::kFactorAt);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
            const uint32_t* const x =
                reinterpret_cast<const uint32_t*>(tokens[c] + TokenSpace<W>::kSums) + low() * kWords + member;
            const uint32_t first = x[0], last = kWords > 4 ? x[4] : 0;
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
                const int upper = (16 * t + group) * kWords, lower = upper + 8 * kWords;
                constexpr int kNext = kWords > 4 ? 4 : 0;
                const uint32_t a[4] = {codes[upper], codes[lower], codes[upper + kNext],
                                       codes[lower + kNext]};
                float d[4];
                multiply_f16(d, a, first, last);
                fold(sums[t][c], d, -factors[16 * t + group], -factors[16 * t + group + 8]);
            }
        }
    }

    /// The lane's x of a group, of both halves.
    __device__ uint4 part_of_x(int c, int g) const {
        return *reinterpret_cast<const uint4*>(tokens[c] + low() * TokenSpace<W>::kLow + g * 2 * kGroup +
                                               member * 16);
    }
    __device__ void read_rows(uint32_t (&a)[4], int t, int g, int s) const {
        const uint2 upper = codes_of<W>(rows[2 * t], g, s, member);
        const uint2 lower = codes_of<W>(rows[2 * t + 1], g, s, member);
        a[0] = upper.x, a[1] = lower.x, a[2] = upper.y, a[3] = lower.y;
    }

    /// For types without scales.
    __device__ void multiply_plain(Sums<kTiles, kColumns>& sums, int groups) const {
        float d[kTiles][kColumns][4]{};
#pragma unroll 2
        for (int g = 0; g < groups; ++g) {
            uint4 x[kColumns];
            for (int c = 0; c < kColumns; ++c) x[c] = part_of_x(c, g);
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
#pragma unroll
                for (int s = 0; s < 2; ++s) {
                    uint32_t a[4];
                    read_rows(a, t, g, s);
                    for (int c = 0; c < kColumns; ++c)
                        multiply_add<W>(d[t][c], a, s ? uint2{x[c].z, x[c].w} : uint2{x[c].x, x[c].y});
                }
            }
        }
        for (int t = 0; t < kTiles; ++t)
            for (int c = 0; c < kColumns; ++c) fold(sums[t][c], d[t][c], 1, 1);
    }

    /// Scales of four groups of a row, two for each group where there are so many.
    struct Scales {
        static constexpr int kEach = W::kScales * kGroup / W::kChunk;  // of a group
        float at[kQuad * kEach];
        __device__ Scales(const unsigned char* own, int row, int quad) {
            const float4* const from =
                reinterpret_cast<const float4*>(own) + row * (W::kScales / 4) + quad * kEach;
#pragma unroll
            for (int i = 0; i < kEach; ++i) {
                const float4 four = from[i];
                at[4 * i] = four.x, at[4 * i + 1] = four.y, at[4 * i + 2] = four.z, at[4 * i + 3] = four.w;
            }
        }
    };

    __device__ void multiply_quad(Sums<kTiles, kColumns>& sums, int quad) const {
        constexpr int kEach = Scales::kEach;
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
            const Scales upper(own, 16 * t + group, quad), lower(own, 16 * t + group + 8, quad);
#pragma unroll
            for (int i = 0; i < kQuad; ++i) {
                const int g = quad * kQuad + i;
                uint32_t a[2][4];
                read_rows(a[0], t, g, 0);
                read_rows(a[1], t, g, 1);
#pragma unroll
                for (int c = 0; c < kColumns; ++c) {
                    const uint4 x = part_of_x(c, g);
                    float d[4];
                    multiply_f16(d, a[0], x.x, x.y);
                    if constexpr (kEach == 2) {
                        fold(sums[t][c], d, upper.at[2 * i], lower.at[2 * i]);
                        multiply_f16(d, a[1], x.z, x.w);
                    } else {
                        multiply_add_f16(d, a[1], x.z, x.w);
                    }
                    fold(sums[t][c], d, upper.at[kEach * i + kEach - 1], lower.at[kEach * i + kEach - 1]);
                }
            }
        }
    }

    __device__ void multiply(Sums<kTiles, kColumns>& sums, int groups) const {
        if constexpr (W::kScales == 0) {
            multiply_plain(sums, groups);
        } else {
#pragma unroll 1
            for (int quad = 0; quad * kQuad < groups; ++quad) multiply_quad(sums, quad);
            if constexpr (W::kMins) fold_minima(sums);
        }
    }
};

}  // namespace slimrt::cuda
