// The elementwise kernels and the cache rows of CUDA against the CPU's, over the same bytes: rows apart from
// each other, at crooked addresses, none at all. Whole buffers are compared, so what is written beside a
// result shows. Runs on a device or on tests/cuda_host.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "cuda_twins.h"
#include "kernels/backend.h"
#include "kernels/cuda/kernels.h"

using namespace slimrt;
using namespace cuda_twins;

void slimrt::cuda::check(cudaError_t result, const char* what) {
    if (result == cudaSuccess) return;
    std::fprintf(stderr, "cuda_rows_test: %s: %s\n", what, cudaGetErrorString(result));
    std::exit(1);
}

namespace {

cuda::Device device;
std::unique_ptr<Backend> cpu;

constexpr DType kWeights[] = {DType::F32,   DType::F16,       DType::BF16,    DType::Q4_0,   DType::Q4_1,
                              DType::Q5_0,  DType::Q5_1,      DType::Q8_0,    DType::Q2_K,   DType::Q3_K,
                              DType::Q4_K,  DType::Q5_K,      DType::Q6_K,    DType::IQ4_NL, DType::IQ4_XS,
                              DType::IQ2_N, DType::IQ3_XXS_N, DType::IQ3_S_N, DType::TQ2_0,  DType::MXFP4};
constexpr DType kRows[] = {DType::F32,      DType::F16, DType::BF16, DType::Q8, DType::FP8_E4M3,
                           DType::FP8_E5M2, DType::Q4,  DType::Q3,   DType::Q2};

std::vector<int32_t> some_of(int64_t n, int64_t end) {
    std::vector<int32_t> values(n);
    for (int32_t& value : values) value = int32_t(chance() % end);
    return values;
}

struct Layout {
    int64_t rows, cols, gap, shift;
};
constexpr Layout kLayouts[] = {{1, 4096, 0, 0}, {3, 96, 0, 0},   {3, 96, 4, 4},   {5, 98, 0, 0},
                               {2, 100, 2, 0},  {4, 64, 0, 1},   {9, 33, 3, 0},   {1, 1, 0, 0},
                               {0, 64, 0, 0},   {2, 2052, 0, 0}, {30, 128, 8, 0}, {1, 4097, 0, 0}};

// sums in another order: some 2^-24 of each of up to 4097 terms at most, in fact far less
constexpr float kSums = 1e-5f, kFew = 2e-6f;

void test_norms() {
    for (const auto& [rows, cols, gap, shift] : kLayouts) {
        const Floats x(rows, cols, gap, shift), weight(1, cols), bias(1, cols, 0, shift);
        for (const NormKind kind : {NormKind::rms, NormKind::layer}) {
            for (int with = 0; with < 4; ++with) {
                const Floats out(rows, cols, gap);
                const bool w = with & 1, b = with & 2;
                cpu->norm(kind, x.here, w ? weight.here : Tensor(), b ? bias.here : Tensor(), 1e-5f,
                          out.here);
                cuda::norm(device, x.there,
                           {kind, w ? weight.there : Tensor(), b ? bias.there : Tensor(), 1e-5f, out.there});
                out.twin.compare(kSums, "norm");
            }
        }
        const Floats out(rows, 1);
        cpu->inverse_rms(x.here, 1e-5f, out.here);
        cuda::inverse_rms(device, x.there, 1e-5f, out.there);
        out.twin.compare(kSums, "inverse_rms");
        cpu->norm(NormKind::rms, x.here, {}, {}, 1e-5f, x.here);
        cuda::norm(device, x.there, {NormKind::rms, {}, {}, 1e-5f, x.there});
        x.twin.compare(kSums, "norm in place");
    }
}

void test_elementwise() {
    for (const auto& [rows, cols, gap, shift] : kLayouts) {
        for (int kind = 0; kind < 5; ++kind) {
            const Floats x(rows, cols, gap, shift), gate(rows, cols, gap), up(rows, cols, 0, shift);
            cpu->activate(Activation(kind), x.here);
            cuda::activate(device, Activation(kind), x.there);
            x.twin.compare(kFew, "activate");
            cpu->gate(Activation(kind), gate.here, up.here);
            cuda::gate(device, Activation(kind), gate.there, up.there);
            gate.twin.compare(kFew, "gate");
        }
        const Floats x(rows, cols, gap, shift), y(rows, cols, shift), row(1, cols), out(rows, cols);
        cpu->add(x.here, y.here);
        cuda::add(device, x.there, y.there);
        cpu->add(x.here, row.here);
        cuda::add(device, x.there, row.there);
        x.twin.compare(0, "add");
        cpu->multiply(x.here, row.here, out.here);
        cuda::multiply(device, x.there, row.there, out.there);
        out.twin.compare(0, "multiply");
        static_cast<Backend&>(*cpu).multiply(x.here, row.here);
        cuda::multiply(device, x.there, row.there, x.there);
        cpu->scale(x.here, 1.7f);
        cuda::scale(device, x.there, 1.7f);
        x.twin.compare(0, "multiply in place, scale");
    }
}

void test_rope() {
    struct Case {
        int heads, head_dim, n_rot;
        int64_t rows, gap, shift;
    };
    for (const auto& [heads, head_dim, n_rot, rows, gap, shift] : {Case{4, 64, 64, 3, 0, 0},
                                                                   {32, 128, 128, 1, 0, 0},
                                                                   {3, 40, 20, 5, 4, 0},
                                                                   {2, 48, 24, 2, 0, 1},
                                                                   {2, 16, 6, 2, 1, 0},
                                                                   {1, 64, 32, 0, 0, 0}}) {
        for (const bool interleaved : {false, true}) {
            const Floats x(rows, int64_t(heads) * head_dim, gap, shift), table(50, n_rot);
            const Ints positions(some_of(rows, 50));
            cpu->rope(x.here, heads, {table.here, n_rot, interleaved}, positions.here);
            cuda::rope(device, x.there, heads, {table.there, n_rot, interleaved}, positions.there);
            x.twin.compare(kFew, "rope");
        }
    }
}

void test_unfold() {
    for (const auto& [rows, cols, gap, shift] : kLayouts) {
        if (rows == 0) continue;
        const Floats x(rows, cols, gap, shift), out(rows + 2, 3 * cols);
        cpu->unfold(x.here, 2, 1, out.here);
        cuda::unfold(device, x.there, 2, 1, out.there);
        out.twin.compare(0, "unfold");
    }
}

void test_gather() {
    for (const DType dtype : kWeights) {
        const int block = dtype_info(dtype).block;
        for (const int64_t rows : {0, 1, 7}) {
            for (const int64_t cols : {256, 768, block == 1 ? 77 : 256}) {
                for (const int64_t gap : {0, block}) {
                    const Both table(dtype, 20, cols, gap, block);
                    const Ints ids(some_of(rows, 20));
                    const Floats out(rows, cols, 0, rows % 2);
                    cpu->gather(table.here, ids.here, out.here);
                    cuda::gather(device, table.there, ids.there, out.there);
                    // NaN as such, whatever its bits; codes times scales are exact
                    out.twin.compare(1e-37f, dtype_info(dtype).name);
                }
            }
        }
    }
}

void test_cache_rows() {
    struct Case {
        int heads, dim;
        int64_t gap, shift;
    };
    for (const auto& [heads, dim, gap, shift] : {Case{1, 4096, 0, 0},
                                                 {4, 64, 0, 0},
                                                 {3, 40, 4, 0},
                                                 {2, 128, 0, 1},
                                                 {1, 33, 0, 0},
                                                 {3, 7, 1, 0},
                                                 {2, 1, 0, 0},
                                                 {5, 96, 4, 4}}) {
        for (const DType dtype : kRows) {
            for (const int64_t n : {0, 1, 70}) {
                constexpr int kTokens = kBlockTokens, kBlocks = 4;
                const int width = heads * dim;
                const size_t block_stride = head_bytes(dtype, dim).total() * heads * kTokens;
                const Floats x(n, width, gap, shift, true), rounded(n, width, 0, shift),
                    loaded(kTokens * 3, width);
                const Twin plane(block_stride * kBlocks);
                std::vector<int32_t> slots(kTokens * kBlocks), order = {2, 0, 3};
                for (size_t i = 0; i < slots.size(); ++i) slots[i] = int32_t(i);
                std::shuffle(slots.begin(), slots.end(), chance);
                slots.resize(n);
                const Ints where(slots), table(order);
                const char* const name = dtype_info(dtype).name;
                Slots to{.dtype = dtype,
                         .width = width,
                         .heads = heads,
                         .block_stride = block_stride,
                         .block_tokens = kTokens};
                to.base = const_cast<std::byte*>(plane.host.data());
                to.slots = where.here;
                cpu->store(x.here, to);
                to.base = plane.there;
                to.slots = where.there;
                cuda::store(device, x.there, to);
                plane.compare(0, name);

                cpu->quantize_dequantize(x.here, dtype, heads, rounded.here);
                cuda::round(device, x.there, dtype, heads, rounded.there);
                rounded.twin.compare(1e-37f, name);

                Rows rows{.dtype = dtype,
                          .width = width,
                          .heads = heads,
                          .block_stride = block_stride,
                          .block_tokens = kTokens};
                rows.base = plane.host.data();
                cpu->load(rows, table.here.i32(), 5, 5 + 70, loaded.here);
                rows.base = plane.there;
                cuda::load(device, rows, table.there.i32(), 5, 5 + 70, loaded.there);
                loaded.twin.compare(1e-37f, name);
            }
        }
    }
}

/// Rows of every type to every type: all columns of their heads, the first, or more than there are; row by
/// row, begun within a block, and with a scale for each channel and half a block.
void test_recode() {
    constexpr int kTokens = kBlockTokens, kBlocks = 4, kHeads = 3, kBegin = 5, kRecoded = 70,
                  kGroup = kTokens / 2;
    const std::vector<int32_t> order = {2, 0, 3};
    const auto bytes = [](DType dtype, int dim, int scale_tokens) {
        return head_bytes(dtype, dim, kTokens, scale_tokens).total() * kHeads;
    };
    const auto plane_of = [&](auto& rows, DType dtype, int dim, const Twin& plane, int scale_tokens = 0) {
        rows = {};  // one by one: of a type that is not known yet nvcc 13.0 forgets members' names in braces
        rows.base = const_cast<std::byte*>(plane.host.data());
        rows.dtype = dtype;
        rows.width = kHeads * dim;
        rows.heads = kHeads;
        rows.block_stride = bytes(dtype, dim, scale_tokens);
        rows.block_tokens = kTokens;
        rows.scale_tokens = scale_tokens;
    };
    for (const int dim : {64, 40}) {
        for (const DType type : kRows) {
            std::vector<int32_t> slots, recoded, groups;
            for (int i = 0; i < kTokens * 3; ++i) slots.push_back(order[i / kTokens] * kTokens + i % kTokens);
            for (int i = 0; i < kRecoded; ++i) recoded.push_back(i * 7 % (kTokens * kBlocks));
            for (int i = 0; i < 4 * kGroup; ++i)
                groups.push_back(i / kGroup * 5 % (2 * kBlocks) * kGroup + i % kGroup);
            const Floats x(int64_t(slots.size()), kHeads * dim);
            const Ints where(slots), table(order), to(recoded), to_groups(groups);
            const Twin stored(bytes(type, dim, 0) * kBlocks);
            Slots at;
            plane_of(at, type, dim, stored);
            at.slots = where.here;
            cpu->store(x.here, at);
            const_cast<Twin&>(stored).upload();
            const auto recode = [&](DType other, int columns, int scale_tokens, const Ints& slots_of, int n) {
                const Twin written(bytes(other, columns, scale_tokens) * kBlocks);
                Rows from;
                plane_of(from, type, dim, stored);
                plane_of(at, other, columns, written, scale_tokens);
                at.slots = slots_of.here;
                cpu->recode(from, order.data(), kBegin, kBegin + n, at);
                from.base = stored.there;
                at.base = written.there;
                at.slots = slots_of.there;
                cuda::recode(device, from, table.there.i32(), kBegin, kBegin + n, at);
                written.compare(0, "recode");
            };
            for (const DType other : kRows) {
                for (const int columns : {dim, dim * 3 / 8, dim + 21}) {
                    recode(other, columns, 0, to, kRecoded);
                    recode(other, columns, kGroup, to_groups, 4 * kGroup);
                }
            }
        }
    }
}

/// Dense rows, one head: what weights are converted with.
void test_dense_rows() {
    for (const DType dtype : {DType::F32, DType::F16, DType::BF16}) {
        for (const int width : {512, 77}) {
            const size_t row = row_bytes(dtype, width) + 16;
            const Floats x(9, width, 0, 0, true), loaded(9, width);
            const Twin plane(row * 12);
            const Ints where({11, 0, 3, 4, 5, 7, 6, 1, 2});
            Slots to{.dtype = dtype, .width = width, .row_bytes = row};
            to.base = const_cast<std::byte*>(plane.host.data());
            to.slots = where.here;
            cpu->store(x.here, to);
            to.base = plane.there;
            to.slots = where.there;
            cuda::store(device, x.there, to);
            plane.compare(0, "dense rows");
            Rows rows{.dtype = dtype, .width = width, .row_bytes = row, .first = 100};
            rows.base = plane.host.data();
            cpu->load(rows, nullptr, 101, 105, loaded.here);
            rows.base = plane.there;
            cuda::load(device, rows, nullptr, 101, 105, loaded.there);
            loaded.twin.compare(1e-37f, "dense rows");
        }
    }
}

/// Every float16 and its neighbours, where rounding and the edges of types are.
void test_every_size() {
    constexpr int kDim = 64;
    const Floats x(0x10000 * 3 / kDim, kDim), out(x.here.rows, kDim);
    for (int64_t i = 0; i < 0x10000; ++i) {
        const uint32_t h = uint32_t(i), sign = (h & 0x8000) << 16, e = h >> 10 & 31, m = h & 0x3ff;
        const uint32_t bits = sign | (e + 112) << 23 | m << 13;
        const uint32_t three[] = {bits, bits | 0x1000, bits | 0x1001};
        std::memcpy(x.here.f32() + 3 * i, three, sizeof three);
    }
    const_cast<Twin&>(x.twin).upload();
    for (const DType dtype : kRows) {
        cpu->quantize_dequantize(x.here, dtype, 1, out.here);
        cuda::round(device, x.there, dtype, 1, out.there);
        out.twin.compare(1e-37f, dtype_info(dtype).name);
    }
}

}  // namespace

int main() {
    device.processors = 4;
    check(cudaStreamCreate(&device.stream), "cudaStreamCreate");
    cpu = open_cpu_backend({.n_threads = 1});
    const auto run = [](const char* what, void (*test)()) {
        std::fprintf(stderr, "%s\n", what);  // where a device ends the process nothing else says so
        test();
    };
    run("norms", test_norms);
    run("elementwise", test_elementwise);
    run("rope", test_rope);
    run("unfold", test_unfold);
    run("gather", test_gather);
    run("cache rows", test_cache_rows);
    run("recode", test_recode);
    run("dense rows", test_dense_rows);
    run("every size", test_every_size);
    std::puts("cuda_rows_test: ok");
}
