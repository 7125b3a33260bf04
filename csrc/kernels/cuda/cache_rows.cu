// Rows of f32 to the types of cache rows (core/dtype.h) and back, bit for bit as kernels/cpu/cache_rows.cpp
// rounds them, so that a saved sequence goes on anywhere. A block has one head of one row; the groups of Q4
// are a warp's.

#include "kernels/cuda/kernels.h"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/packs.cuh"
#include "kernels/cuda/rows.cuh"

namespace slimrt::cuda {
namespace {

constexpr uint32_t kMagnitude = 0x7fffffff, kExponent = 0x7f800000;
constexpr unsigned kMaxThreads = 512;

__device__ uint32_t magnitude(float x) { return __float_as_uint(x) & kMagnitude; }
__device__ bool finite(float x) { return magnitude(x) < kExponent; }
__device__ float nan() { return __uint_as_float(0x7fc00000); }
__device__ uint8_t sign(float x) { return __float_as_uint(x) >> 24 & 0x80; }

// How one element of a head is coded. Types with a scale choose it by the largest magnitude of the head.

template <class Row>
struct Coder;

template <>
struct Coder<RowF32> {
    NoScale scale;
    __device__ static float encode(float x) { return x; }
};

template <>
struct Coder<RowF16> {
    NoScale scale;
    __device__ static uint16_t encode(float x) {  // of NaN the device would keep neither sign nor digits
        const uint32_t u = __float_as_uint(x), nan = 0x7e00 | (u >> 16 & 0x8000) | (u >> 13 & 0x3ff);
        return magnitude(x) > kExponent ? static_cast<uint16_t>(nan) : to_f16(x);
    }
};

template <>
struct Coder<RowBF16> {
    NoScale scale;
    __device__ static uint16_t encode(float x) {
        return magnitude(x) > kExponent ? static_cast<uint16_t>(__float_as_uint(x) >> 16 | 0x40) : to_bf16(x);
    }
};

template <>
struct Coder<RowQ8> {
    float scale;
    bool zeros;  // the scale says it all
    __device__ explicit Coder(float high)
        : scale(finite(high) ? high / 127 : nan()), zeros(!finite(high) || scale == 0) {}
    __device__ int8_t encode(float x) const {
        const float code = zeros ? 0.0f : x / scale;
        return static_cast<int8_t>(__float2int_rn(code > 127 ? 127.0f : code < -127 ? -127.0f : code));
    }
};

/// A finite magnitude to a float of so many bits of mantissa whose smallest normal number is 2^smallest: to
/// the nearest, ties to even. Larger exponents go on as if there were enough bits for them.
template <int mantissa, int smallest>
__device__ uint32_t to_fp8(uint32_t magnitude) {
    constexpr int drop = 23 - mantissa;
    if (magnitude < static_cast<uint32_t>(127 + smallest) << 23) {
        const float steps = __uint_as_float(static_cast<uint32_t>(127 + mantissa - smallest) << 23);
        return static_cast<uint32_t>(__float2int_rn(__uint_as_float(magnitude) * steps));
    }
    const uint32_t rounded = (magnitude + (1u << (drop - 1)) - 1 + (magnitude >> drop & 1)) >> drop;
    return rounded - (static_cast<uint32_t>(126 + smallest) << mantissa);
}

template <>
struct Coder<RowE4M3> {
    float scale, shrink;  // to below 2^8
    bool zeros;
    __device__ explicit Coder(float high) : scale(nan()), shrink(0), zeros(!finite(high)) {
        if (zeros) return;
        constexpr int kLowest = -100;  // of smaller rows the power would not be a float
        const int exponent = static_cast<int>(__float_as_uint(high) >> 23) - 127;
        const int power = exponent < kLowest ? kLowest : exponent;
        scale = __uint_as_float(static_cast<uint32_t>(power + 1 + 127) << 23);  // infinite for power 127
        shrink = __uint_as_float(static_cast<uint32_t>(7 - power + 127) << 23);
    }
    __device__ uint8_t encode(float x) const {
        const float small = x * shrink;
        return zeros ? 0 : static_cast<uint8_t>(to_fp8<3, -6>(magnitude(small)) | sign(small));
    }
};

template <>
struct Coder<RowE5M2> {
    NoScale scale;
    __device__ static uint8_t encode(float x) {
        constexpr uint32_t kInfinity = 0x7c, kNan = 0x7e, kMax = 0x48000000;
        const uint32_t m = magnitude(x), rounded = to_fp8<2, -14>(m > kMax ? kMax : m);
        return static_cast<uint8_t>((m > kExponent         ? kNan
                                     : rounded > kInfinity ? kInfinity
                                                           : rounded) |
                                    sign(x));
    }
};

/// Rows that are coded: of f32, or stored ones, of each head the first columns.
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
        for (int i = 0; i < n; ++i) x.at[i] = element_of(rows, from, column + i);
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

// Q4.

/// The largest f16 not above x, and the smallest not below.
__device__ uint16_t half_below(float x) {
    const uint16_t h = to_f16(x);
    if (!(from_f16(h) > x)) return h;
    return static_cast<uint16_t>(h == 0 ? 0x8001 : h & 0x8000 ? h + 1 : h - 1);
}
__device__ uint16_t half_above(float x) { return half_below(-x) ^ 0x8000; }

/// The first of a warp's numbers that equals the one which `better` prefers to all: of zeros the sign counts.
template <class Better>
__device__ float first_best(float x, Better better) {
    float best = x;
    for (int bits = kWarp / 2; bits > 0; bits /= 2) {
        const float other = __shfl_xor_sync(kAll, best, bits);
        best = better(other, best) ? other : best;
    }
    return __shfl_sync(kAll, x, __ffs(static_cast<int>(__ballot_sync(kAll, x == best))) - 1);
}

struct CodedGroup {
    int code;  // of this lane's element
    Affine how;
};

/// A group, an element in each lane; lanes without one have the first.
__device__ CodedGroup code_group(float x) {
    constexpr int kMax = 15;
    if (__any_sync(kAll, !finite(x))) return {0, {0x7e00, 0x7e00}};
    const float low = first_best(x, [](float a, float b) { return a < b; });
    const float high = first_best(x, [](float a, float b) { return a > b; });
    // Rounded outwards, so that every element lies between minimum and minimum + 15 scales.
    CodedGroup group;
    group.how.minimum = half_below(low);
    const float min = from_f16(group.how.minimum);
    group.how.scale = half_above((high - min) / kMax);
    const float scale = from_f16(group.how.scale), code = scale > 0 ? (x - min) / scale : 0.0f;
    group.code = __float2int_rn(code < kMax ? code : static_cast<float>(kMax));
    return group;
}

/// Blocks (head, row); each warp takes every so many groups.
template <bool stored, class Source>
__global__ void code_groups(Source x, int64_t rows, Target to) {
    constexpr int kGroup = RowQ4::kGroup;
    const int dim = to.plane.head_dim, head = blockIdx.x, lane = threadIdx.x % kWarp;
    for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
        Target::Head place{};
        if constexpr (stored) place = to.head(row, head);
        for (int first = threadIdx.x - lane; first < dim; first += blockDim.x) {
            const int size = min(kGroup, dim - first), half = (size + 1) / 2;
            const CodedGroup group =
                code_group(x.template at<1>(row, head, first + (lane < size ? lane : 0)).at[0]);
            if constexpr (stored) {
                const int other = __shfl_down_sync(kAll, group.code, half);
                const int high = lane + half < size ? other : 0;
                if (lane < half)
                    place.data[first / 2 + lane] = static_cast<unsigned char>(group.code | high << 4);
                if (lane == 0) reinterpret_cast<Affine*>(place.scales)[first / kGroup] = group.how;
            } else if (lane < size) {
                to.numbers(row, head)[first + lane] =
                    RowQ4::number(static_cast<uint8_t>(group.code), group.how);
            }
        }
    }
}

// Scales of channels: a warp codes a column of as many rows as share one, at most kWarp of them, a row in
// each lane; lanes without one have the first.

/// Blocks (head, group of rows).
template <class Row>
__global__ void code_channels(StoredSource x, int64_t groups, Target to) {
    const int tokens = to.plane.scale_tokens, dim = to.plane.head_dim, head = blockIdx.x;
    const int lane = threadIdx.x % kWarp;
    for (int64_t group = blockIdx.y; group < groups; group += gridDim.y) {
        const int64_t row = group * tokens + (lane < tokens ? lane : 0);
        const Target::Head place = to.head(row, head);
        for (int column = threadIdx.x / kWarp; column < dim; column += blockDim.x / kWarp) {
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

/// The same of Q4: a warp codes the two columns of a byte.
template <>
__global__ void code_channels<RowQ4>(StoredSource x, int64_t groups, Target to) {
    constexpr int kGroup = RowQ4::kGroup;  // columns whose halves share bytes
    const int tokens = to.plane.scale_tokens, dim = to.plane.head_dim, head = blockIdx.x;
    const int lane = threadIdx.x % kWarp;
    for (int64_t group = blockIdx.y; group < groups; group += gridDim.y) {
        const int64_t row = group * tokens + (lane < tokens ? lane : 0);
        const Target::Head place = to.head(row, head);
        for (int byte = threadIdx.x / kWarp; byte < (dim + 1) / 2; byte += blockDim.x / kWarp) {
            const int first = byte / (kGroup / 2) * kGroup, half = (min(kGroup, dim - first) + 1) / 2;
            const int low = first + byte - first / 2, high = low + half;
            const bool two = high < first + min(kGroup, dim - first);
            const CodedGroup of_low = code_group(x.at<1>(row, head, low).at[0]);
            const CodedGroup of_high = code_group(x.at<1>(row, head, two ? high : low).at[0]);
            if (lane < tokens)
                place.data[byte] = static_cast<unsigned char>(of_low.code | (two ? of_high.code << 4 : 0));
            if (lane > 0) continue;
            reinterpret_cast<Affine*>(place.scales)[low] = of_low.how;
            if (two) reinterpret_cast<Affine*>(place.scales)[high] = of_high.how;
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

/// Calls fn with the trait of a type other than Q4.
template <class Fn>
void with_whole_codes(DType dtype, const Fn& fn) {
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
    if (to.plane.dtype == DType::Q4) {
        shape.block = dim3(threads_for(dim, kMaxThreads));
        return launch(device, &code_groups<stored, Source>, shape, x, rows, to);
    }
    with_whole_codes(to.plane.dtype, [&]<class Row>(Row) {
        const bool fits = stored ? plane_fits(to.plane, sizeof(typename Row::Code))
                                 : packs_fit(to.out.data, to.out.stride * sizeof(float), dim);
        const bool packed = fits && packs && dim % kPack == 0;
        shape.block = dim3(threads_for(packed ? dim / kPack : dim, kMaxThreads));
        launch(device, packed ? &code_heads<Row, kPack, stored, Source> : &code_heads<Row, 1, stored, Source>,
               shape, x, rows, to);
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
    if (slots.dtype == DType::Q4) return launch(device, &code_channels<RowQ4>, shape, x, groups, to);
    if (slots.dtype == DType::Q8) return launch(device, &code_channels<RowQ8>, shape, x, groups, to);
    launch(device, &code_channels<RowE4M3>, shape, x, groups, to);
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
    if (rows.dtype == DType::Q4 || rows.scale_tokens)
        return each<1>(device, end - begin, rows.width, false,
                       LoadElements{{view, table, begin}, Matrix(out)});
    with_whole_codes(rows.dtype, [&]<class Row>(Row) {
        const bool packed = plane_fits(view, sizeof(typename Row::Code)) && packs_fit(out);
        each(device, end - begin, rows.width, packed, Load<Row>{view, table, begin, Matrix(out)});
    });
}

}  // namespace slimrt::cuda
