// How a block codes a head of a row, for the kernels that store rows.
#pragma once

#include "kernels/cuda/row_coders.cuh"
#include "kernels/cuda/rows.cuh"

namespace slimrt::cuda {

/// Rows of f32 as a source.
struct FloatSource {
    Matrix x;
    int head_dim;
    template <int n>
    __device__ Pack<float, n> at(int64_t row, int head, int column) const {
        return load_pack<n>(x.row(row) + head * head_dim + column);
    }
};

/// The plane that is written, with the rows' slots; or `out`, which gets rows as they would be read back.
struct Target {
    RowsView plane;
    const int32_t* slots = nullptr;  // none: `out`
    Matrix out;

    struct Head {
        unsigned char *data, *scales;
    };
    __device__ Head head(int64_t row, int head) const {
        const int32_t slot = slots[row], block = plane.paged ? slot / kBlockTokens : 0;
        const HeadRow to = row_at(plane, &block, plane.paged ? slot % kBlockTokens : slot, head);
        return {const_cast<unsigned char*>(to.data), const_cast<unsigned char*>(to.scales)};
    }
    __device__ float* numbers(int64_t row, int head) const { return out.row(row) + head * plane.head_dim; }
};

/// The coder of a head of a row, with its scale; all threads of the block call it.
template <class Row, int n, class Source>
__device__ Coder<Row> coder_of(const Source& x, int64_t row, int head, int dim, uint32_t* shared) {
    if constexpr (Row::kScaled) {
        uint32_t high = 0;
        for (int i = threadIdx.x * n; i < dim; i += blockDim.x * n) {
            for (const float value : x.template at<n>(row, head, i).at) high = max(high, magnitude(value));
        }
        const auto larger = [](uint32_t a, uint32_t b) { return max(a, b); };
        return Coder<Row>(__uint_as_float(join_block(high, 0u, shared, larger)));
    } else {
        return Coder<Row>();
    }
}

/// Codes a head of a row.
template <class Row, int n, bool stored, class Source>
__device__ void code_head(const Source& x, int64_t row, int head, const Target& to, uint32_t* shared) {
    using Code = typename Row::Code;
    const int dim = to.plane.head_dim;
    const Coder<Row> coder = coder_of<Row, n>(x, row, head, dim, shared);
    Target::Head place{};
    if constexpr (stored) place = to.head(row, head);
    if constexpr (stored && Row::kScaled) {
        if (threadIdx.x == 0) *reinterpret_cast<float*>(place.scales) = coder.scale;
    }
    for (int i = threadIdx.x * n; i < dim; i += blockDim.x * n) {
        const auto values = x.template at<n>(row, head, i);
        Pack<Code, n> codes;
        for (int j = 0; j < n; ++j) codes.at[j] = coder.encode(values.at[j]);
        if constexpr (stored) {
            store_pack(reinterpret_cast<Code*>(place.data) + i, codes);
        } else {
            Pack<float, n> back;
            for (int j = 0; j < n; ++j) back.at[j] = Row::number(codes.at[j], coder.scale);
            store_pack(to.numbers(row, head) + i, back);
        }
    }
}

// Few bits.

/// Writes the codes of a unit to a row.
template <class Row>
__device__ void write_unit(const RowsView& plane, unsigned char* row, int unit, uint32_t codes) {
    const int first = unit * Row::kBits, n = min(Row::kBits, plane.head_elements - first);
    for (int i = 0; i < n; ++i) row[first + i] = static_cast<unsigned char>(codes >> 8 * i);
}

/// Codes a head of a row; each warp takes every so many-th group.
template <class Row, bool stored, class Source>
__device__ void code_head_in_groups(const Source& x, int64_t row, int head, const Target& to) {
    constexpr int kGroup = Row::kGroup, kUnits = kGroup / Row::kUnit;
    const int dim = to.plane.head_dim, lane = threadIdx.x % kWarp;
    Target::Head place{};
    if constexpr (stored) place = to.head(row, head);
    for (int first = threadIdx.x - lane; first < dim; first += blockDim.x) {
        const int size = min(kGroup, dim - first);
        const CodedGroup group =
            code_group<Row>(x.template at<1>(row, head, first + (lane < size ? lane : 0)).at[0]);
        if constexpr (stored) {
            uint32_t codes = 0;  // of the unit that this lane, one of the first, writes
            for (int i = 0; i < Row::kUnit; ++i) {
                const int column = Row::column(lane % kUnits, i, size);
                const int code = __shfl_sync(kAll, group.code, column);
                if (column < size) codes |= code << Row::shift(i);
            }
            if (lane < kUnits) write_unit<Row>(to.plane, place.data, first / Row::kUnit + lane, codes);
            if (lane == 0) reinterpret_cast<Affine*>(place.scales)[first / kGroup] = group.how;
        } else if (lane < size) {
            to.numbers(row, head)[first + lane] = Row::number(static_cast<uint8_t>(group.code), group.how);
        }
    }
}

/// Whether heads of a plane may be moved in packs of codes of this size.
inline bool plane_fits(const RowsView& plane, size_t size) {
    const size_t stride = plane.paged ? plane.block_stride : plane.row_bytes;
    return packs_fit(plane.base, stride, plane.head_dim, size);
}

inline Target target_of(const Slots& slots) {
    Target to;
    to.plane = RowsView({.base = slots.base,
                         .dtype = slots.dtype,
                         .width = slots.width,
                         .heads = slots.heads,
                         .row_bytes = slots.row_bytes,
                         .block_stride = slots.block_stride,
                         .block_tokens = slots.block_tokens,
                         .scale_tokens = slots.scale_tokens});
    to.slots = slots.slots.i32();
    return to;
}

}  // namespace slimrt::cuda
