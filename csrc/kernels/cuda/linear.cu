// Chooses the kernel of a product. F32 weights: linear_float.cu, and linear_many.cu for many tokens, for
// which both are split. Else up to eight tokens: linear_few.cu; more: x is rounded to 16 bits in the
// workspace and multiplied in tiles by linear_many.cu, or by cuBLASLt where it is found and there are enough
// tokens. For it quantised weights are unpacked to f16 in the workspace, a slice of rows at a time that stays
// in L2. 16-bit weights whose rows are not whole pieces of 16 bytes, which are rare, are read again for every
// eight tokens.
#include <algorithm>
#include <vector>

#include "core/error.h"
#include "kernels/cuda/cublas_lt.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/linear_weights.cuh"
#include "kernels/cuda/norm.cuh"

namespace slimrt::cuda {

namespace {

constexpr int kLtTokens = 64;      // from here on cuBLASLt, where it is found
constexpr int kFloatTokens = 24;   // up to here F32 weights are read for every 8, as cheaply as split once
constexpr int kSliceTokens = 256;  // for quantised weights: unpacking one takes as long as 70 tokens do
constexpr size_t kAlignment = 256;

size_t padded(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

/// Products with weights of one type, as many as a kernel takes.
struct Group {
    DType dtype;
    Job job;
};

void require_aligned(const Tensor& weight) {
    size_t unit = sizeof(float);
    with_weight(weight.dtype, [&](auto w) { unit = w.kUnit; });
    if (reinterpret_cast<uintptr_t>(weight.data) % unit == 0 && weight.stride % unit == 0) return;
    fail(ErrorCode::argument, "a ", dtype_info(weight.dtype).name,
         " weight must have its rows at multiples of ", unit, " bytes");
}

/// Whether linear_many.cu can multiply: rows in 16 bits must be whole pieces.
bool has_pieces(DType dtype, const Job& job) {
    const auto whole = [&](const Part& part) {
        return (reinterpret_cast<uintptr_t>(part.weight) | part.stride | size_t(job.k) * 2) % kPiece == 0;
    };
    return !is_float(dtype) || std::all_of(job.parts, job.parts + job.n_parts, whole);
}

bool in_tiles(const Group& g) {
    if (g.dtype == DType::F32) return g.job.tokens > kFloatTokens;
    return g.job.tokens > kFewTokens && has_pieces(g.dtype, g.job);
}

/// Elements from a row of x in 16 bits to the next.
int stride_of(const Job& job) { return divide_up(job.k, kStep) * kStep; }
int stride_of(const Group& g) { return g.dtype == DType::F32 ? split_stride(g.job.k) : stride_of(g.job); }

/// How many rows of a quantised part are unpacked to f16 for cuBLASLt at a time; 0: none, since a slice that
/// fits in two thirds of L2 would have tiles for less than a quarter of the multiprocessors.
int slice_rows(const Device& device, const Job& job, const Part& part) {
    constexpr size_t kMost = size_t(32) << 20;
    constexpr int kTile = 128;
    if (job.tokens < kSliceTokens || job.all_heads() > 1) return 0;
    const size_t row = size_t(stride_of(job)) * 2;
    const int fit = int(std::min(device.l2_bytes / 3 * 2, kMost) / row) / kTile * kTile;
    if (fit >= part.rows) return part.rows;
    return 4 * (fit / kTile) * divide_up(job.tokens, kTile) >= device.processors ? fit : 0;
}

/// Whether cuBLASLt multiplies.
bool by_lt(const Device& device, const Group& g) {
    const Job& job = g.job;
    const auto slices = [&](const Part& part) { return slice_rows(device, job, part) > 0; };
    const bool enough =
        is_float(g.dtype) ? job.tokens >= kLtTokens : std::all_of(job.parts, job.parts + job.n_parts, slices);
    return enough && cublas_lt(device.id);
}

/// Bytes for cuBLASLt: its workspace, and the largest slice.
size_t lt_bytes(const Device& device, const Group& g) {
    size_t slice = 0;
    const size_t row = size_t(stride_of(g.job)) * 2;
    for (int p = 0; p < g.job.n_parts && !is_float(g.dtype); ++p)
        slice = std::max(slice, slice_rows(device, g.job, g.job.parts[p]) * row);
    return CublasLt::kWorkspace + padded(slice);
}

std::vector<Group> group(Tensor x, int n_heads, std::span<const Product> products) {
    std::vector<Group> groups;
    for (const Product& product : products) {
        if (product.weight.rows == 0) continue;
        require_aligned(product.weight);
        auto own = std::find_if(groups.begin(), groups.end(), [&](const Group& g) {
            return g.dtype == product.weight.dtype && g.job.n_parts < kParts;
        });
        if (own == groups.end()) {
            const int siblings = int(product.out.cols / product.weight.rows);
            const Job job{.x = reinterpret_cast<const unsigned char*>(x.data),
                          .x_stride = x.stride,
                          .tokens = int(x.rows),
                          .k = int(x.cols / n_heads),
                          .heads = n_heads / siblings,
                          .group = siblings,
                          .n_parts = 0,
                          .parts = {}};
            own = groups.insert(groups.end(), {product.weight.dtype, job});
        }
        own->job.parts[own->job.n_parts++] = {
            .weight = reinterpret_cast<const unsigned char*>(product.weight.data),
            .stride = product.weight.stride,
            .bias = product.bias ? product.bias.f32() : nullptr,
            .out = reinterpret_cast<unsigned char*>(product.out.data),
            .out_stride = product.out.stride,
            .rows = int(product.out.cols / n_heads)};
    }
    return groups;
}

/// Layout of the workspace: x in 16 bits, its powers of two and Rounded::too_large, and what the kernels
/// need.
struct Workspace {
    size_t x = 0, inverse = 0, rest = 0;
    size_t total() const { return x + inverse + rest; }
};

Workspace workspace_of(const Device& device, const std::vector<Group>& groups) {
    Workspace w;
    for (const Group& g : groups) {
        const Job& job = g.job;
        if (!in_tiles(g)) continue;
        const size_t rows = size_t(job.tokens) * job.all_heads();
        w.x = std::max(w.x, padded(rows * stride_of(g) * 2));
        w.inverse = padded(rows * sizeof(float) + sizeof(int));
        if (g.dtype == DType::F32) {
            w.rest = std::max(w.rest, padded(float_bytes(device, job)));
            continue;
        }
        w.rest = std::max(w.rest, padded(split_bytes(device, job)));
        if (by_lt(device, g)) w.rest = std::max(w.rest, lt_bytes(device, g));
    }
    return w;
}

/// out = out * inverse + bias, where that changes something; a block a sibling of a head of a token.
__global__ void finish_kernel(Job job, const float* inverse, int p) {
    const Part part = job.parts[p];
    const int token = blockIdx.x / job.all_heads(), columns = blockIdx.x % job.all_heads();
    const float factor = inverse[blockIdx.x];
    if (factor == 1 && !part.bias) return;
    float* const out = reinterpret_cast<float*>(part.out + token * part.out_stride) + columns * part.rows;
    for (int i = threadIdx.x; i < part.rows; i += blockDim.x)
        out[i] = out[i] * factor + bias_at(job, {p, columns / job.group, 0}, i);
}

void few(const Device& device, DType dtype, const Job& job) {
    if (dtype == DType::F32)
        few_floats(device, job);
    else
        few_tokens(device, dtype, job);
}

void few_at_a_time(const Device& device, const Group& group) {
    for (int first = 0; first < group.job.tokens; first += kFewTokens) {
        Job some = group.job;
        some.x += first * some.x_stride;
        some.tokens = std::min(kFewTokens, some.tokens - first);
        for (int p = 0; p < some.n_parts; ++p) some.parts[p].out += first * some.parts[p].out_stride;
        few(device, group.dtype, some);
    }
}

/// Of one sibling of every head.
LtProduct lt_product(const Group& group, const Part& part, const Rounded& x, int sibling) {
    const Job& job = group.job;
    return {.bf16 = group.dtype == DType::BF16,
            .m = part.rows,
            .n = job.tokens,
            .k = job.k,
            .heads = job.heads,
            .weight = part.weight,
            .x = x.x + size_t(sibling) * x.stride,
            .out = reinterpret_cast<float*>(part.out) + size_t(sibling) * part.rows,
            .weight_stride = int64_t(part.stride / 2),
            .x_stride = int64_t(x.stride) * job.all_heads(),
            .out_stride = int64_t(part.out_stride / sizeof(float)),
            .x_step = int64_t(x.stride) * job.group,
            .out_step = int64_t(part.rows) * job.group};
}

/// Whether cuBLASLt multiplied a part of 16 bits: all heads at once, one sibling after the other.
bool multiply_siblings_by_lt(const Device& device, const Group& group, const Part& part, const Rounded& x,
                             std::byte* workspace) {
    for (int sibling = 0; sibling < group.job.group; ++sibling) {
        const LtProduct own = lt_product(group, part, x, sibling);
        if (!CublasLt::fits(own) || !cublas_lt(device.id)->multiply(own, workspace, device.stream))
            return false;
    }
    return true;
}

/// Whether cuBLASLt multiplied a part; a quantised one is unpacked to the workspace, slice by slice.
bool multiply_part_by_lt(const Device& device, const Group& group, int p, const Rounded& x,
                         std::byte* workspace) {
    const Part& part = group.job.parts[p];
    if (is_float(group.dtype)) return multiply_siblings_by_lt(device, group, part, x, workspace);
    const LtProduct all = lt_product(group, part, x, 0);
    auto* const slice = reinterpret_cast<uint16_t*>(workspace + CublasLt::kWorkspace);
    const int rows = slice_rows(device, group.job, part);
    for (int first = 0; first < part.rows; first += rows) {
        LtProduct some = all;
        some.m = std::min(rows, part.rows - first);
        some.weight = slice;
        some.weight_stride = x.stride;
        some.out += first;
        unpack_rows(device, group.dtype, group.job, p, first, some.m, x, slice);
        if (!cublas_lt(device.id)->multiply(some, workspace, device.stream)) return false;
    }
    return true;
}

/// Whether cuBLASLt multiplied. Where an unpacked weight exceeds f16, slimrt's own products overwrite its
/// result.
bool multiply_by_lt(const Device& device, const Group& group, const Rounded& x, std::byte* workspace) {
    if (!by_lt(device, group)) return false;
    for (int p = 0; p < group.job.n_parts; ++p) {
        if (!multiply_part_by_lt(device, group, p, x, workspace)) return false;
        const Shape shape{.grid = dim3(group.job.tokens * group.job.all_heads()), .block = dim3(256)};
        launch(device, finish_kernel, shape, group.job, x.inverse, p);
    }
    if (!is_float(group.dtype))
        many_tokens(device, group.dtype, group.job, x, reinterpret_cast<float*>(workspace), x.too_large);
    return true;
}

}  // namespace

bool native(DType dtype) {
    return dtype == DType::F32 || with_weight(dtype, [](auto) {});
}

size_t linear_workspace(const Device& device, Tensor x, int n_heads, std::span<const Product> products) {
    return workspace_of(device, group(x, n_heads, products)).total();
}

void linear(const Device& device, Tensor x, int n_heads, std::span<const Product> products,
            std::byte* workspace) {
    if (x.rows == 0) return;
    const std::vector<Group> groups = group(x, n_heads, products);
    const Workspace sizes = workspace_of(device, groups);
    std::byte* const rest = workspace + sizes.x + sizes.inverse;
    enum { none, f16, bf16, split } rounded = none;
    for (const Group& g : groups) {
        if (!in_tiles(g)) {
            few_at_a_time(device, g);
            continue;
        }
        float* const inverse = reinterpret_cast<float*>(workspace + sizes.x);
        const Rounded to{.x = reinterpret_cast<const uint16_t*>(workspace),
                         .inverse = inverse,
                         .stride = stride_of(g),
                         .too_large = reinterpret_cast<int*>(inverse + x.rows * n_heads)};
        if (g.dtype == DType::F32) {
            if (rounded != split) split_rows(device, g.job, to);
            rounded = split;
            float_products(device, g.job, to, rest);
            continue;
        }
        const auto wanted = g.dtype == DType::BF16 ? bf16 : f16;
        if (rounded != wanted) round_rows(device, g.job, wanted == bf16, to);
        rounded = wanted;
        if (!multiply_by_lt(device, g, to, rest))
            many_tokens(device, g.dtype, g.job, to, reinterpret_cast<float*>(rest));
    }
}

bool linear_around(const Device& device, Tensor x, std::span<const Product> products, const Around& around) {
    const auto alike = [&](const Product& p) {
        return p.weight.dtype == products[0].weight.dtype && p.weight.rows == products[0].weight.rows;
    };
    const auto f32 = [](const Product& p) { return p.weight.dtype == DType::F32; };
    if (x.rows == 0 || x.rows > kFewTokens || std::ranges::any_of(products, f32)) return false;
    if (around.norm && (x.rows > kNormedTokens || !packs_norm(around.normed, *around.norm))) return false;
    if (around.gate && !std::ranges::all_of(products, alike)) return false;
    bool started = true;  // the first one or all
    for (const Group& g : group(x, 1, products))
        started = started && few_tokens(device, g.dtype, g.job, around);
    return started;
}

void linear_experts(const Device& device, Tensor x, int share, Tensor ids, int64_t step,
                    std::span<const Product> products, const Ordered* ordered) {
    const int pairs = int(ids.rows * ids.cols);
    const Job rows{.x = reinterpret_cast<const unsigned char*>(x.data),
                   .x_stride = x.stride,
                   .tokens = int(x.rows),
                   .k = int(x.cols)};
    const Product* rounded = nullptr;  // the last one for whose type x was rounded
    for (const Product& product : products) {
        const DType dtype = product.weight.dtype;
        require_aligned(product.weight);
        Job job = rows;
        job.tokens = 1;
        job.heads = pairs;
        job.n_parts = 1;
        job.experts = ids.i32();
        job.share = share;
        job.parts[0] = {.weight = reinterpret_cast<const unsigned char*>(product.weight.data),
                        .stride = product.weight.stride,
                        .bias = product.bias ? product.bias.f32() : nullptr,
                        .out = reinterpret_cast<unsigned char*>(product.out.data),
                        .rows = int(product.out.cols),
                        .step = int(step)};
        if (!ordered || dtype == DType::F32 || !has_pieces(dtype, job)) {
            few(device, dtype, job);
            continue;
        }
        const bool bf16 = dtype == DType::BF16;
        const Rounded to{ordered->rounded, ordered->inverse, stride_of(job)};
        if (!rounded || (rounded->weight.dtype == DType::BF16) != bf16) round_rows(device, rows, bf16, to);
        rounded = &product;
        job.tokens = pairs;
        job.heads = 1;
        job.order = ordered->order;
        job.places = ordered->places;
        many_ordered(device, dtype, job, to, ordered->tile, ordered->n_tiles);
    }
}

}  // namespace slimrt::cuda
