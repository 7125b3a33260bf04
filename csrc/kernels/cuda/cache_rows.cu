// Rows of f32 to the types of cache rows (core/dtype.h) and back, bit for bit as kernels/cpu/cache_rows.cpp
// rounds them, so that a saved sequence goes on anywhere. A block has one head of one row; groups of
// few bits are a warp's.

#include "kernels/cuda/kernels.h"
#include "kernels/cuda/row_coders.cuh"
#include "kernels/cuda/rows.cuh"

namespace slimrt::cuda {
namespace {

constexpr unsigned kMaxThreads = 512;

/// Rows that are coded: of f32, or stored ones, of each head the first columns; zeros beyond those there are.
struct FloatSource {
    Matrix x;
    int head_dim;
    template <int n>
    __device__ Pack<float, n> at(int64_t row, int head, int column) const {
        return load_pack<n>(x.row(row) + head * head_dim + column);
    }
};
struct StoredSource {
    RowsView rows;
    const int32_t* table;
    int64_t begin;
    template <int n>
    __device__ Pack<float, n> at(int64_t row, int head, int column) const {
        const HeadRow from = row_at(rows, table, begin + row, head);
        Pack<float, n> x;
        for (int i = 0; i < n; ++i)
            x.at[i] = column + i < rows.head_dim ? element_of(rows, from, column + i) : 0.0f;
        return x;
    }
};

/// The plane that is written, with the slots of rows; or where rows go as they would be read back.
struct Target {
    RowsView plane;
    const int32_t* slots = nullptr;  // none: `out`
    Matrix out;

    struct Head {
        unsigned char *data, *scales;
    };
    __device__ Head head(int64_t row, int head) const {
        const int32_t slot = slots[row], tokens = plane.block_tokens, block = tokens ? slot / tokens : 0;
        const HeadRow to = row_at(plane, &block, tokens ? slot % tokens : slot, head);
        return {const_cast<unsigned char*>(to.data), const_cast<unsigned char*>(to.scales)};
    }
    __device__ float* numbers(int64_t row, int head) const { return out.row(row) + head * plane.head_dim; }
};

/// How a head of a row is coded; all threads of the block call it.
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

/// Blocks (head, row).
template <class Row, int n, bool stored, class Source>
__global__ void code_heads(Source x, int64_t rows, Target to) {
    using Code = typename Row::Code;
    __shared__ uint32_t shared[kWarp];
    const int dim = to.plane.head_dim, head = blockIdx.x;
    for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
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
}

// Few bits.

/// The codes of a unit to a row.
template <class Row>
__device__ void write_unit(const RowsView& plane, unsigned char* row, int unit, uint32_t codes) {
    const int first = unit * Row::kBits, n = min(Row::kBits, plane.head_elements - first);
    for (int i = 0; i < n; ++i) row[first + i] = static_cast<unsigned char>(codes >> 8 * i);
}

/// Blocks (head, row); each warp takes every so many groups.
template <class Row, bool stored, class Source>
__global__ void code_groups(Source x, int64_t rows, Target to) {
    constexpr int kGroup = Row::kGroup, kUnits = kGroup / Row::kUnit;
    const int dim = to.plane.head_dim, head = blockIdx.x, lane = threadIdx.x % kWarp;
    for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
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
                to.numbers(row, head)[first + lane] =
                    Row::number(static_cast<uint8_t>(group.code), group.how);
            }
        }
    }
}

// Scales of channels: a warp codes columns of as many rows as share scales, at most kWarp of them, a row in
// each lane; lanes without one have the first.

/// A unit of columns; `writes`: this lane has a row.
template <class Row>
__device__ void code_unit(const StoredSource& x, int64_t row, int head, int unit, const RowsView& plane,
                          const Target::Head& place, bool writes) {
    const int dim = plane.head_dim;
    uint32_t codes = 0;
    for (int i = 0; i < Row::kUnit; ++i) {
        const int column = Row::column(unit, i, dim);
        if (column == dim) continue;
        const CodedGroup group = code_group<Row>(x.at<1>(row, head, column).at[0]);
        codes |= group.code << Row::shift(i);
        if (threadIdx.x % kWarp == 0) reinterpret_cast<Affine*>(place.scales)[column] = group.how;
    }
    if (writes) write_unit<Row>(plane, place.data, unit, codes);
}

/// Blocks (head, group of rows). Each warp takes every so many columns or, of few bits, units.
template <class Row>
__global__ void code_channels(StoredSource x, int64_t groups, Target to) {
    const int tokens = to.plane.scale_tokens, dim = to.plane.head_dim, head = blockIdx.x;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
    for (int64_t group = blockIdx.y; group < groups; group += gridDim.y) {
        const int64_t row = group * tokens + (lane < tokens ? lane : 0);
        const Target::Head place = to.head(row, head);
        if constexpr (Row::kGroup) {
            for (int unit = warp; unit * Row::kBits < to.plane.head_elements; unit += warps)
                code_unit<Row>(x, row, head, unit, to.plane, place, lane < tokens);
        } else {
            for (int column = warp; column < dim; column += warps) {
                const float value = x.at<1>(row, head, column).at[0];
                uint32_t high = magnitude(value);
                for (int bits = kWarp / 2; bits > 0; bits /= 2)
                    high = max(high, __shfl_xor_sync(kAll, high, bits));
                const Coder<Row> coder(__uint_as_float(high));
                if (lane < tokens)
                    reinterpret_cast<typename Row::Code*>(place.data)[column] = coder.encode(value);
                if (lane == 0) reinterpret_cast<float*>(place.scales)[column] = coder.scale;
            }
        }
    }
}

// And back.

template <class Row>
struct Load {
    RowsView rows;
    const int32_t* table;
    int64_t begin;
    Matrix out;
    template <int n>
    __device__ void run(int64_t row, int64_t column) const {
        const int head = static_cast<int>(column) / rows.head_dim;
        const int at = static_cast<int>(column) % rows.head_dim;
        const HeadRow from = row_at(rows, table, begin + row, head);
        const auto codes = load_pack<n>(reinterpret_cast<const typename Row::Code*>(from.data) + at);
        typename Row::Scale scale{};
        if constexpr (Row::kScaled) scale = *reinterpret_cast<const typename Row::Scale*>(from.scales);
        Pack<float, n> to;
        for (int j = 0; j < n; ++j) to.at[j] = Row::number(codes.at[j], scale);
        store_pack(out.row(row) + column, to);
    }
};

/// Where not all columns of a head have one scale.
struct LoadElements {
    StoredSource from;
    Matrix out;
    template <int>
    __device__ void run(int64_t row, int64_t column) const {
        const int head = static_cast<int>(column) / from.rows.head_dim;
        const int at = static_cast<int>(column) % from.rows.head_dim;
        store_pack(out.row(row) + column, from.at<1>(row, head, at));
    }
};

/// Calls fn with the trait of a type.
template <class Fn>
void with_row(DType dtype, const Fn& fn) {
    switch (dtype) {
        case DType::F16:
            return fn(RowF16());
        case DType::BF16:
            return fn(RowBF16());
        case DType::Q8:
            return fn(RowQ8());
        case DType::FP8_E4M3:
            return fn(RowE4M3());
        case DType::FP8_E5M2:
            return fn(RowE5M2());
        case DType::Q4:
            return fn(RowFew<4>());
        case DType::Q3:
            return fn(RowFew<3>());
        case DType::Q2:
            return fn(RowFew<2>());
        default:
            return fn(RowF32());
    }
}

/// Whether heads of a plane may be moved in packs of codes of this size.
bool plane_fits(const RowsView& plane, size_t size) {
    const size_t stride = plane.block_tokens ? plane.block_stride : plane.row_bytes;
    return packs_fit(plane.base, stride, plane.head_dim, size);
}

/// Rows of `x` to the target; `packs`: those of f32 may be read in packs.
template <bool stored, class Source>
void code(const Device& device, const Source& x, int64_t rows, int heads, bool packs, const Target& to) {
    const int dim = to.plane.head_dim;
    if (rows == 0 || dim == 0) return;
    Shape shape;
    shape.grid = dim3(heads, static_cast<unsigned>(rows < kMaxGridY ? rows : kMaxGridY));
    with_row(to.plane.dtype, [&]<class Row>(Row) {
        if constexpr (Row::kGroup) {
            shape.block = dim3(threads_for(dim, kMaxThreads));
            launch(device, &code_groups<Row, stored, Source>, shape, x, rows, to);
        } else {
            const bool fits = stored ? plane_fits(to.plane, sizeof(typename Row::Code))
                                     : packs_fit(to.out.data, to.out.stride * sizeof(float), dim);
            const bool packed = fits && packs && dim % kPack == 0;
            shape.block = dim3(threads_for(packed ? dim / kPack : dim, kMaxThreads));
            launch(device,
                   packed ? &code_heads<Row, kPack, stored, Source> : &code_heads<Row, 1, stored, Source>,
                   shape, x, rows, to);
        }
    });
}

Target target_of(const Slots& slots) {
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

}  // namespace

void round(const Device& device, Tensor x, DType dtype, int heads, Tensor out) {
    Rows rows;
    rows.dtype = dtype;
    rows.width = static_cast<int>(x.cols);
    rows.heads = heads;
    Target to;
    to.plane = RowsView(rows);
    to.out = Matrix(out);
    code<false>(device, FloatSource{Matrix(x), to.plane.head_dim}, x.rows, heads, packs_fit(x), to);
}

void store(const Device& device, Tensor x, const Slots& slots) {
    const Target to = target_of(slots);
    code<true>(device, FloatSource{Matrix(x), to.plane.head_dim}, x.rows, slots.heads, packs_fit(x), to);
}

/// Whole groups of rows.
void recode_channels(const Device& device, const StoredSource& x, int64_t rows, const Slots& slots) {
    const int64_t groups = rows / slots.scale_tokens;
    const int dim = slots.width / slots.heads;
    if (groups == 0 || dim == 0) return;
    Shape shape;
    shape.grid = dim3(slots.heads, static_cast<unsigned>(groups < kMaxGridY ? groups : kMaxGridY));
    shape.block = dim3(threads_for(dim * kWarp, kMaxThreads));
    const Target to = target_of(slots);
    with_row(slots.dtype, [&]<class Row>(Row) {
        if constexpr (Row::kScaled) launch(device, &code_channels<Row>, shape, x, groups, to);
    });
}

void recode(const Device& device, const Rows& from, const int32_t* table, int64_t begin, int64_t end,
            const Slots& slots) {
    constexpr bool kPacks = true;
    if (slots.scale_tokens && head_bytes(slots.dtype, 1).scales)
        return recode_channels(device, StoredSource{RowsView(from), table, begin}, end - begin, slots);
    code<true>(device, StoredSource{RowsView(from), table, begin}, end - begin, slots.heads, kPacks,
               target_of(slots));
}

void load(const Device& device, const Rows& rows, const int32_t* table, int64_t begin, int64_t end,
          Tensor out) {
    const RowsView view(rows);
    with_row(rows.dtype, [&]<class Row>(Row) {
        if constexpr (!Row::kGroup) {
            const bool packed = plane_fits(view, sizeof(typename Row::Code)) && packs_fit(out);
            if (!rows.scale_tokens)
                return each(device, end - begin, rows.width, packed,
                            Load<Row>{view, table, begin, Matrix(out)});
        }
        each<1>(device, end - begin, rows.width, false, LoadElements{{view, table, begin}, Matrix(out)});
    });
}

}  // namespace slimrt::cuda
