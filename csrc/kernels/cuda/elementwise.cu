// Norms, RoPE, activations, sums and gathered rows. All are bound by memory or, at decoding, by a kernel's
// latency: every thread moves packs of 16 bytes where rows allow it.
#include "kernels/cuda/activations.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/norm.cuh"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/packs.cuh"
#include "kernels/cuda/quant.cuh"
#include "kernels/cuda/rotate.cuh"

namespace slimrt::cuda {
namespace {

struct Activate {
    Activation kind;
    Matrix x;
    template <int n>
    __device__ void run(int64_t row, int64_t column) const {
        auto v = load_pack<n>(x.row(row) + column);
        for (float& value : v.at) value = activated(kind, value);
        store_pack(x.row(row) + column, v);
    }
};

struct Gate {
    Activation kind;
    Matrix gate, up;
    template <int n>
    __device__ void run(int64_t row, int64_t column) const {
        auto v = load_pack<n>(gate.row(row) + column);
        const auto times = load_pack<n>(up.row(row) + column);
        for (int j = 0; j < n; ++j) v.at[j] = activated(kind, v.at[j]) * gated(kind, times.at[j]);
        store_pack(gate.row(row) + column, v);
    }
};

struct Add {
    Matrix x, y;  // the stride of y is 0 where its one row is added to all
    template <int n>
    __device__ void run(int64_t row, int64_t column) const {
        auto v = load_pack<n>(x.row(row) + column);
        const auto more = load_pack<n>(y.row(row) + column);
        for (int j = 0; j < n; ++j) v.at[j] += more.at[j];
        store_pack(x.row(row) + column, v);
    }
};

struct Multiply {
    Matrix x, y, out;
    template <int n>
    __device__ void run(int64_t row, int64_t column) const {
        auto v = load_pack<n>(x.row(row) + column);
        const auto times = load_pack<n>(y.data + column);
        for (int j = 0; j < n; ++j) v.at[j] *= times.at[j];
        store_pack(out.row(row) + column, v);
    }
};

struct Scale {
    Matrix x;
    float factor;
    template <int n>
    __device__ void run(int64_t row, int64_t column) const {
        auto v = load_pack<n>(x.row(row) + column);
        for (float& value : v.at) value *= factor;
        store_pack(x.row(row) + column, v);
    }
};

struct Clamp {
    Matrix x;
    float limit;
    template <int n>
    __device__ void run(int64_t row, int64_t column) const {
        auto v = load_pack<n>(x.row(row) + column);
        for (float& value : v.at)
            value = value < -limit ? -limit : value > limit ? limit : value;  // NaN stays
        store_pack(x.row(row) + column, v);
    }
};

struct Reweigh {
    Matrix x, before, after;
    int64_t dim;
    template <int n>
    __device__ void run(int64_t row, int64_t column) const {
        const float was = before.row(row)[column / dim], is = after.row(row)[column / dim];
        const float factor = was == -__builtin_inff() ? 0 : expf(was - is);
        auto v = load_pack<n>(x.row(row) + column);
        for (float& value : v.at) value *= factor;
        store_pack(x.row(row) + column, v);
    }
};

struct GateHeads {
    Matrix x, by;
    int64_t dim;
    template <int n>
    __device__ void run(int64_t row, int64_t column) const {
        auto v = load_pack<n>(x.row(row) + column);
        for (float& value : v.at) value = sigmoid_times(value, by.row(row)[column / dim]);
        store_pack(x.row(row) + column, v);
    }
};

struct Unfold {
    Matrix x, out;
    int64_t rows, cols, stride, padding;  // rows and cols of x
    template <int n>
    __device__ void run(int64_t row, int64_t column) const {
        const int64_t from = row * stride - padding + column / cols;
        Pack<float, n> v{};
        if (from >= 0 && from < rows) v = load_pack<n>(x.row(from) + column % cols);
        store_pack(out.row(row) + column, v);
    }
};

/// Rows of a table of F32, F16 or BF16.
template <class Bits, float (*number)(Bits)>
struct Gather {
    const unsigned char* table;
    size_t stride;
    const int32_t* ids;
    Matrix out;
    template <int n>
    __device__ void run(int64_t row, int64_t column) const {
        const auto v = load_pack<n>(reinterpret_cast<const Bits*>(table + ids[row] * stride) + column);
        Pack<float, n> to;
        for (int j = 0; j < n; ++j) to.at[j] = number(v.at[j]);
        store_pack(out.row(row) + column, to);
    }
};
__device__ float same(float x) { return x; }

/// For quantised weights: "columns" are sixteens.
template <class Weights>
struct GatherBlocks {
    const unsigned char* table;
    size_t stride;
    const int32_t* ids;
    Matrix out;
    bool packed;
    template <int>
    __device__ void run(int64_t row, int64_t column) const {
        const int64_t block = column * 16 / Weights::kElements;
        const unsigned char* const from = table + ids[row] * stride + block * Weights::kBytes;
        const Sixteen s = Weights::load(from, static_cast<int>(column * 16 % Weights::kElements));
        float* const to = out.row(row) + column * 16;
        for (int j = 0; j < 16; j += kPack) {
            const Pack<float, kPack> v{s[j], s[j + 1], s[j + 2], s[j + 3]};
            if (packed) {
                store_pack(to + j, v);
            } else {
                for (int i = 0; i < kPack; ++i) to[j + i] = v.at[i];
            }
        }
    }
};

/// A block a row. x += more first, where there is more.
template <int n>
__global__ void norm_rows(NormView norm, Matrix x, Matrix more, int64_t cols) {
    begin_early();
    if (more.data) {  // each thread reads again what it wrote
        for (int64_t i = threadIdx.x * n; i < cols; i += blockDim.x * n) Add{x, more}.run<n>(blockIdx.x, i);
    }
    norm_row<n>(norm, x, cols, blockIdx.x);
}

template <int n>
__global__ void inverse_rms_rows(Matrix x, float eps, int64_t cols, Matrix out) {
    begin_early();
    __shared__ float shared[kWarp];
    const float squares =
        total<n>(x.row(blockIdx.x), cols, shared, [](float value) { return value * value; });
    if (threadIdx.x == 0) *out.row(blockIdx.x) = 1 / sqrtf(squares / static_cast<float>(cols) + eps);
}

Shape block_a_row(const Tensor& x, bool packed) {
    return {.grid = dim3(static_cast<unsigned>(x.rows)),
            .block = dim3(norm_threads(x.cols, packed)),
            .early = true};
}

const unsigned char* bytes_of(const Tensor& t) { return reinterpret_cast<const unsigned char*>(t.data); }

template <class Bits, float (*number)(Bits)>
void gather_plain(const Device& device, const Tensor& table, const Tensor& ids, const Tensor& out) {
    const bool packed = packs_fit(out) && packs_fit(table.data, table.stride, out.cols, sizeof(Bits));
    each(device, out.rows, out.cols, packed,
         Gather<Bits, number>{bytes_of(table), table.stride, ids.i32(), Matrix(out)});
}

template <class Weights>
void gather_blocks(const Device& device, const Tensor& table, const Tensor& ids, const Tensor& out) {
    each<1>(device, out.rows, out.cols / 16, false,
            GatherBlocks<Weights>{bytes_of(table), table.stride, ids.i32(), Matrix(out), packs_fit(out)});
}

}  // namespace

void gather(const Device& device, Tensor table, Tensor ids, Tensor out) {
    switch (table.dtype) {
        case DType::F32:
            return gather_plain<float, same>(device, table, ids, out);
        case DType::F16:
            return gather_plain<uint16_t, from_f16>(device, table, ids, out);
        case DType::BF16:
            return gather_plain<uint16_t, from_bf16>(device, table, ids, out);
        case DType::Q4_0:
            return gather_blocks<WeightsQ4_0>(device, table, ids, out);
        case DType::Q4_1:
            return gather_blocks<WeightsQ4_1>(device, table, ids, out);
        case DType::Q5_0:
            return gather_blocks<WeightsQ5_0>(device, table, ids, out);
        case DType::Q5_1:
            return gather_blocks<WeightsQ5_1>(device, table, ids, out);
        case DType::Q8_0:
            return gather_blocks<WeightsQ8_0>(device, table, ids, out);
        case DType::Q2_K:
            return gather_blocks<WeightsQ2_K>(device, table, ids, out);
        case DType::Q3_K:
            return gather_blocks<WeightsQ3_K>(device, table, ids, out);
        case DType::Q4_K:
            return gather_blocks<WeightsQ4_K>(device, table, ids, out);
        case DType::Q5_K:
            return gather_blocks<WeightsQ5_K>(device, table, ids, out);
        case DType::Q6_K:
            return gather_blocks<WeightsQ6_K>(device, table, ids, out);
        case DType::IQ4_NL:
            return gather_blocks<WeightsIQ4_NL>(device, table, ids, out);
        case DType::IQ4_XS:
            return gather_blocks<WeightsIQ4_XS>(device, table, ids, out);
        case DType::TQ2_0:
            return gather_blocks<WeightsTQ2_0>(device, table, ids, out);
        case DType::MXFP4:
            return gather_blocks<WeightsMXFP4>(device, table, ids, out);
        case DType::IQ2_N:
            return gather_blocks<WeightsIQ2_N>(device, table, ids, out);
        case DType::IQ3_XXS_N:
            return gather_blocks<WeightsIQ3_XXS_N>(device, table, ids, out);
        case DType::IQ3_S_N:
            return gather_blocks<WeightsIQ3_S_N>(device, table, ids, out);
        default:
            return;  // no type of weights, or one that is converted at load
    }
}

void norm(const Device& device, Tensor x, const Norm& norm, Tensor more) {
    if (x.rows == 0) return;
    const bool packed = packs_norm(x, norm) && (!more || packs_fit(more));
    launch(device, packed ? &norm_rows<kPack> : &norm_rows<1>, block_a_row(x, packed), NormView(norm),
           Matrix(x), Matrix(more), x.cols);
}

void inverse_rms(const Device& device, Tensor x, float eps, Tensor out) {
    if (x.rows == 0) return;
    const bool packed = packs_fit(x);
    launch(device, packed ? &inverse_rms_rows<kPack> : &inverse_rms_rows<1>, block_a_row(x, packed),
           Matrix(x), eps, x.cols, Matrix(out));
}

void rope(const Device& device, Tensor x, int n_heads, const Rope& rope, Tensor positions) {
    const int head_dim = static_cast<int>(x.cols / n_heads), half = rope.n_rot / 2;
    const bool packed = packs_rotate(x, n_heads, rope);
    const int64_t pairs = static_cast<int64_t>(n_heads) * half;
    if (rope.interleaved)
        each(device, x.rows, pairs, packed,
             Rotate<true>{Matrix(x), Matrix(rope.table), positions.i32(), head_dim, half, rope.first});
    else
        each(device, x.rows, pairs, packed,
             Rotate<false>{Matrix(x), Matrix(rope.table), positions.i32(), head_dim, half, rope.first});
}

void activate(const Device& device, Activation kind, Tensor x) {
    each(device, x.rows, x.cols, packs_fit(x), Activate{kind, Matrix(x)});
}

void gate(const Device& device, Activation kind, Tensor gate, Tensor up) {
    each(device, gate.rows, gate.cols, packs_fit(gate) && packs_fit(up),
         Gate{kind, Matrix(gate), Matrix(up)});
}

void add(const Device& device, Tensor x, Tensor y) {
    Matrix more(y);
    if (y.rows == 1) more.stride = 0;
    each(device, x.rows, x.cols, packs_fit(x) && packs_fit(y), Add{Matrix(x), more});
}

void multiply(const Device& device, Tensor x, Tensor y, Tensor out) {
    each(device, x.rows, x.cols, packs_fit(x) && packs_fit(y) && packs_fit(out),
         Multiply{Matrix(x), Matrix(y), Matrix(out)});
}

void scale(const Device& device, Tensor x, float factor) {
    each(device, x.rows, x.cols, packs_fit(x), Scale{Matrix(x), factor});
}

void clamp(const Device& device, Tensor x, float limit) {
    each(device, x.rows, x.cols, packs_fit(x), Clamp{Matrix(x), limit});
}

void reweigh(const Device& device, Tensor x, Tensor before, Tensor after) {
    const int64_t dim = x.cols / before.cols;
    each(device, x.rows, x.cols, packs_fit(x) && dim % kPack == 0,
         Reweigh{Matrix(x), Matrix(before), Matrix(after), dim});
}

void gate_heads(const Device& device, Tensor x, Tensor by) {
    const int64_t dim = x.cols / by.cols;
    each(device, x.rows, x.cols, packs_fit(x) && dim % kPack == 0, GateHeads{Matrix(x), Matrix(by), dim});
}

void unfold(const Device& device, Tensor x, int64_t stride, int64_t padding, Tensor out) {
    each(device, out.rows, out.cols, packs_fit(x) && packs_fit(out),
         Unfold{Matrix(x), Matrix(out), x.rows, x.cols, stride, padding});
}

}  // namespace slimrt::cuda
