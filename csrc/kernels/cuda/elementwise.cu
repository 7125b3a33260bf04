// Norms, rotation, activations, sums of rows, and rows of tables. All of it is bound by memory, or at
// decoding by the time that a kernel takes at all: every thread moves packs of 16 bytes where rows allow it.
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/packs.cuh"
#include "kernels/cuda/quant.cuh"

namespace slimrt::cuda {
namespace {

// Activations as kernels/cpu/elementwise.cpp has them; what is NaN stays so.

__device__ float sigmoid_times(float x, float argument) { return x / (1 + expf(-argument)); }

__device__ float activated(Activation kind, float x) {
    const float positive = x < 0 ? 0.0f : x;
    switch (kind) {
        case Activation::silu:
            return sigmoid_times(x, x);
        case Activation::gelu_tanh:
            return sigmoid_times(x, 1.5957691216f * fmaf(0.044715f * x * x, x, x));
        case Activation::gelu_erf: {
            const float size = fminf(20, fabsf(x));  // from there on erfc is 0
            return positive - 0.5f * size * erfcf(0.70710678f * size);
        }
        case Activation::relu:
            return positive;
        case Activation::tanh:
            return tanhf(x);
        case Activation::relu_squared:
            return positive * positive;
        default: {
            const float most = x > 7 ? 7.0f : x;
            return sigmoid_times(most, 1.702f * most);
        }
    }
}

__device__ float gated(Activation kind, float up) {
    return kind != Activation::clamped_swish ? up : (up > 7 ? 7.0f : up < -7 ? -7.0f : up) + 1;
}

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

/// "Columns" are pairs, n_rot / 2 of each head; n of them are two packs of x and two of cos, sin, ...
template <bool interleaved>
struct Rotate {
    Matrix x, table;
    const int32_t* positions;
    int head_dim, half, begin;  // begin: where a head's columns that turn do
    template <int n>
    __device__ void run(int64_t row, int64_t column) const {
        const int head = static_cast<int>(column) / half, i = static_cast<int>(column) % half;
        float* const first =
            x.row(row) + static_cast<int64_t>(head) * head_dim + begin + (interleaved ? 2 * i : i);
        float* const second = first + (interleaved ? n : half);
        const float* const turn = table.row(positions[row]) + 2 * i;
        Pack<float, n> v[2] = {load_pack<n>(first), load_pack<n>(second)};
        const Pack<float, n> turns[2] = {load_pack<n>(turn), load_pack<n>(turn + n)};
        for (int j = 0; j < n; ++j) {
            const int even = 2 * j, odd = 2 * j + 1;
            const float cosine = turns[even / n].at[even % n], sine = turns[odd / n].at[odd % n];
            float& a = interleaved ? v[even / n].at[even % n] : v[0].at[j];
            float& b = interleaved ? v[odd / n].at[odd % n] : v[1].at[j];
            const float turned = a * cosine - b * sine;
            b = b * cosine + a * sine;
            a = turned;
        }
        store_pack(first, v[0]);
        store_pack(second, v[1]);
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

/// Of quantised weights: "columns" are sixteens.
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

// Norms: a block has a row, which it reads again from its first-level cache.

/// Sum of fn over the elements of a row.
template <int n, class Fn>
__device__ float total(const float* row, int64_t cols, float* shared, Fn fn) {
    float sum = 0;
    for (int64_t i = threadIdx.x * n; i < cols; i += blockDim.x * n) {
        const auto v = load_pack<n>(row + i);
        for (const float value : v.at) sum += fn(value);
    }
    return join_block(sum, 0.0f, shared, [](float a, float b) { return a + b; });
}

template <int n>
__global__ void norm_rows(NormKind kind, Matrix x, const float* weight, const float* bias, float eps,
                          int64_t cols, Matrix out) {
    __shared__ float shared[kWarp];
    const float* const row = x.row(blockIdx.x);
    const float count = static_cast<float>(cols);
    float mean = 0;
    if (kind == NormKind::layer)
        mean = total<n>(row, cols, shared, [](float value) { return value; }) / count;
    const float squares =
        total<n>(row, cols, shared, [mean](float value) { return (value - mean) * (value - mean); });
    const float scale = 1 / sqrtf(squares / count + eps);
    for (int64_t i = threadIdx.x * n; i < cols; i += blockDim.x * n) {
        auto v = load_pack<n>(row + i);
        for (float& value : v.at) value = (value - mean) * scale;
        if (weight) {
            const auto times = load_pack<n>(weight + i);
            for (int j = 0; j < n; ++j) v.at[j] *= times.at[j];
        }
        if (bias) {
            const auto more = load_pack<n>(bias + i);
            for (int j = 0; j < n; ++j) v.at[j] += more.at[j];
        }
        store_pack(out.row(blockIdx.x) + i, v);
    }
}

template <int n>
__global__ void inverse_rms_rows(Matrix x, float eps, int64_t cols, Matrix out) {
    __shared__ float shared[kWarp];
    const float squares =
        total<n>(x.row(blockIdx.x), cols, shared, [](float value) { return value * value; });
    if (threadIdx.x == 0) *out.row(blockIdx.x) = 1 / sqrtf(squares / static_cast<float>(cols) + eps);
}

/// A block for each row: many threads where there are few rows, to be done soon.
Shape block_a_row(const Device& device, const Tensor& x, bool packed) {
    constexpr unsigned kMax = 1024;
    const bool few = x.rows < 2 * device.processors;
    Shape shape;
    shape.grid = dim3(static_cast<unsigned>(x.rows));
    shape.block = dim3(threads_for(packed ? x.cols / kPack : x.cols, few ? kMax : kThreads));
    return shape;
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
        case DType::I32:
        case DType::Q8:
        case DType::FP8_E4M3:
        case DType::FP8_E5M2:
        case DType::Q4:
        case DType::Q3:
        case DType::Q2:
            return;  // not a type of weights
        case DType::TQ1_0:
        case DType::IQ2_XXS:
        case DType::IQ2_XS:
        case DType::IQ2_S:
        case DType::IQ3_XXS:
        case DType::IQ3_S:
            return;  // which a load lays out as others first (kernels/cpu/repack.h)
    }
}

void norm(const Device& device, NormKind kind, Tensor x, Tensor weight, Tensor bias, float eps, Tensor out) {
    if (x.rows == 0) return;
    const bool packed =
        packs_fit(x) && packs_fit(out) && (!weight || packs_fit(weight)) && (!bias || packs_fit(bias));
    launch(device, packed ? &norm_rows<kPack> : &norm_rows<1>, block_a_row(device, x, packed), kind,
           Matrix(x), Matrix(weight).data, Matrix(bias).data, eps, x.cols, Matrix(out));
}

void inverse_rms(const Device& device, Tensor x, float eps, Tensor out) {
    if (x.rows == 0) return;
    const bool packed = packs_fit(x);
    launch(device, packed ? &inverse_rms_rows<kPack> : &inverse_rms_rows<1>, block_a_row(device, x, packed),
           Matrix(x), eps, x.cols, Matrix(out));
}

void rope(const Device& device, Tensor x, int n_heads, const Rope& rope, Tensor positions) {
    const int head_dim = static_cast<int>(x.cols / n_heads), half = rope.n_rot / 2;
    const bool packed = packs_fit(x) && packs_fit(rope.table) && head_dim % kPack == 0 && half % kPack == 0 &&
                        rope.first % kPack == 0;
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
