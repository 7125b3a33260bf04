// Rows of f32 to the types of cache rows (core/dtype.h) and back, bit for bit as kernels/cpu/cache_rows.cpp
// rounds them, so that a saved sequence can be loaded on any device. A block has one head of one row; in few
// bits a warp has a group.
#include "kernels/cuda/code_rows.cuh"
#include "kernels/cuda/kernels.h"

namespace slimrt::cuda {
namespace {

constexpr unsigned kMaxThreads = 512;

/// Stored rows as a source: the first columns of each head; columns that are not stored are zeros.
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

/// Blocks (head, row).
template <class Row, int n, bool stored, class Source>
__global__ void code_heads(Source x, int64_t rows, Target to) {
    __shared__ uint32_t shared[kWarp];
    for (int64_t row = blockIdx.y; row < rows; row += gridDim.y)
        code_head<Row, n, stored>(x, row, blockIdx.x, to, shared);
}

/// Blocks (head, row).
template <class Row, bool stored, class Source>
__global__ void code_groups(Source x, int64_t rows, Target to) {
    for (int64_t row = blockIdx.y; row < rows; row += gridDim.y)
        code_head_in_groups<Row, stored>(x, row, blockIdx.x, to);
}

// Scales of channels: a warp codes columns of the rows that share scales, at most kWarp rows, one in each
// lane; lanes without one take the first.

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

/// Blocks (head, group of rows). Each warp takes every so many-th column or, in few bits, unit.
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

// Back to f32.

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

/// Where the columns of a head have several scales.
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

/// Codes the rows of `x`; packs: rows of f32 may be read in packs.
template <bool stored, class Source>
void code(const Device& device, const Source& x, int64_t rows, int heads, bool packs, const Target& to) {
    const int dim = to.plane.head_dim;
    if (rows == 0 || dim == 0) return;
    Shape shape;
    shape.grid = dim3(heads, static_cast<unsigned>(rows < kMaxGridY ? rows : kMaxGridY));
    with_row_type(to.plane.dtype, [&]<class Row>(Row) {
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

/// For whole groups of rows.
void recode_channels(const Device& device, const StoredSource& x, int64_t rows, const Slots& slots) {
    const int64_t groups = rows / slots.scale_tokens;
    const int dim = slots.width / slots.heads;
    if (groups == 0 || dim == 0) return;
    Shape shape;
    shape.grid = dim3(slots.heads, static_cast<unsigned>(groups < kMaxGridY ? groups : kMaxGridY));
    shape.block = dim3(threads_for(dim * kWarp, kMaxThreads));
    const Target to = target_of(slots);
    with_row_type(slots.dtype, [&]<class Row>(Row) {
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
    with_row_type(rows.dtype, [&]<class Row>(Row) {
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
