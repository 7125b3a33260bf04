// Calls that a recorded step fuses leave behind what they do one by one, bit for bit: by other kernels first,
// then by a recorded step. Beside them stand calls that must not be fused, since one reads what another
// wrote.
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "kernels/backend.h"

using namespace slimrt;

namespace {

constexpr int kRows = 3, kHeads = 4, kDim = 64, kWidth = kHeads * kDim, kBlockTokens = 32;
int failures = 0;

/// Device memory with numbers that are the same in every run.
struct Memory {
    Backend& backend;
    std::vector<Buffer> buffers;
    std::mt19937 random{1};

    Tensor floats(int64_t rows, int64_t cols) {
        std::vector<float> numbers(rows * cols);
        for (float& x : numbers) x = std::normal_distribution<float>()(random);
        const Tensor t = take(DType::F32, rows, cols);
        backend.upload(t, numbers.data(), t.bytes());
        return t;
    }
    Tensor ints(const std::vector<int32_t>& values) {
        const Tensor t = take(DType::I32, 1, int64_t(values.size()));
        backend.upload(t, values.data(), t.bytes());
        return t;
    }
    /// Bytes by chance, but scales that are numbers.
    Tensor weight(DType dtype, int64_t rows, int64_t cols) {
        const Tensor t = take(dtype, rows, cols);
        std::vector<uint16_t> words(t.bytes() / 2);
        for (uint16_t& word : words) word = uint16_t(random() & 0xbbff);  // as f16 below 1
        backend.upload(t, words.data(), t.bytes());
        return t;
    }
    Tensor take(DType dtype, int64_t rows, int64_t cols) {
        const Tensor shape(nullptr, dtype, rows, cols);
        buffers.push_back(backend.alloc(MemoryKind::scratch, shape.bytes(), "a tensor"));
        return Tensor(buffers.back().data.get(), dtype, rows, cols);
    }
    std::vector<std::byte> all() const {
        std::vector<std::byte> bytes;
        for (const Buffer& b : buffers) {
            bytes.resize(bytes.size() + b.bytes);
            backend.download(bytes.data() + bytes.size() - b.bytes,
                             Tensor(b.data.get(), DType::I32, 1, int64_t(b.bytes / 4)), b.bytes);
        }
        return bytes;
    }
};

using Calls = std::function<void()>;
/// Makes memory and gives the calls that are to be made there.
using Make = std::function<Calls(Backend&, Memory&)>;

/// What memory holds after the calls, made `times` as a step or once by themselves.
std::vector<std::byte> after(const Make& make, int times) {
    const std::unique_ptr<Backend> backend = open_cuda_backend(0);
    Memory memory{*backend, {}};
    const Calls calls = make(*backend, memory);
    if (times == 0) calls();
    for (int i = 0; i < times; ++i) backend->capture_and_replay("step", calls);
    return memory.all();
}

/// Calls whose results do not depend on how often they were made before.
void expect_same(const char* what, const Make& make) {
    const auto single = after(make, 0);
    for (const int times : {1, 3})
        if (after(make, times) != single) std::printf("FAIL: %s, step %d\n", what, times), ++failures;
}

Slots slots_of(Memory& memory, DType dtype, int heads, Tensor slots) {
    const size_t bytes = head_bytes(dtype, kWidth / heads, kBlockTokens, 0).total() * heads;
    const Tensor plane = memory.take(DType::I32, 1, int64_t(bytes / 4));
    return {.base = plane.data,
            .dtype = dtype,
            .width = kWidth,
            .heads = heads,
            .block_stride = bytes,
            .block_tokens = kBlockTokens,
            .slots = slots};
}

/// x as it was, in every step.
void restore(Backend& backend, Tensor from, Tensor x) { backend.unfold(from, 1, 0, x); }

Make rotated_and_stored(DType dtype, bool interleaved, int heads_of_rows) {
    return [=](Backend& backend, Memory& memory) -> Calls {
        const Tensor q0 = memory.floats(kRows, kWidth), k0 = memory.floats(kRows, kWidth);
        const Tensor q = memory.floats(kRows, kWidth), k = memory.floats(kRows, kWidth);
        const Tensor v = memory.floats(kRows, kWidth), slots = memory.ints({5, 0, 31});
        const Rope rope{memory.floats(16, kDim), kDim, interleaved};
        const Tensor positions = memory.ints({7, 0, 15});
        const Slots of_k = slots_of(memory, dtype, heads_of_rows, slots);
        const Slots of_v = slots_of(memory, DType::F16, kHeads, slots);
        return [=, &backend] {
            restore(backend, q0, q);
            restore(backend, k0, k);
            backend.rope(q, kHeads, rope, positions);
            backend.rope(k, kHeads, rope, positions);
            backend.store(k, of_k);
            backend.store(v, of_v);
            backend.rope(k, kHeads, rope, positions);  // what was stored stays as it was
        };
    };
}

Make summed_and_normed(NormKind kind, bool in_place) {
    return [=](Backend& backend, Memory& memory) -> Calls {
        const Tensor x0 = memory.floats(kRows, kWidth), x = memory.floats(kRows, kWidth);
        const Tensor y0 = memory.floats(kRows, kWidth), y = memory.floats(kRows, kWidth);
        const Tensor weight = memory.floats(1, kWidth), bias = memory.floats(1, kWidth);
        const Tensor out = in_place ? y : memory.floats(kRows, kWidth);
        return [=, &backend] {
            restore(backend, x0, x);
            restore(backend, y0, y);
            backend.add(x, y);
            backend.norm(kind, x, weight, bias, 1e-5f, out);
            backend.add(x, bias);  // a row for all of them
            backend.norm(kind, x, weight, {}, 1e-5f, x);
            backend.add(x, y);
            backend.norm(kind, y, weight, {}, 1e-5f, y);  // of something else
            backend.add(x, y);                            // the last call of a step
        };
    };
}

/// rows: of gate and up, which may differ; of as many tokens.
Make gated(DType dtype, Activation kind, int64_t rows, int64_t other_rows, int64_t tokens, bool biased) {
    return [=](Backend& backend, Memory& memory) -> Calls {
        constexpr int64_t kInner = 512;
        const Tensor x = memory.floats(tokens, kInner);
        const auto weight = [&](int64_t n) { return memory.weight(dtype, n, kInner); };
        const auto vector = [&](int64_t n) { return biased ? memory.floats(1, n) : Tensor{}; };
        const int64_t rows_of_all = rows + other_rows;
        const Tensor both = memory.floats(tokens, rows_of_all);  // rows apart, as of fused projections
        const Product up{weight(other_rows), vector(other_rows), both.cols_of(0, other_rows)};
        const Product gate{weight(rows), vector(rows), both.cols_of(other_rows, rows)};
        return [=, &backend] {
            const Product products[] = {up, gate};
            backend.linear(x, products);
            if (rows == other_rows) backend.gate(kind, gate.out, up.out);
            backend.linear(x, products);
            backend.gate(kind, gate.out, gate.out);  // by itself
        };
    };
}

/// As a layer has it: the norm's result takes the product's place; then again, where another sum is normed.
Make added_and_normed(DType dtype, NormKind kind, int64_t tokens) {
    return [=](Backend& backend, Memory& memory) -> Calls {
        const Tensor heads = memory.floats(tokens, 512), weight = memory.weight(dtype, kWidth, 512);
        const Tensor x0 = memory.floats(tokens, kWidth), x = memory.floats(tokens, kWidth);
        const Tensor out = memory.floats(tokens, kWidth), other = memory.floats(tokens, kWidth);
        const Tensor of_norm = memory.floats(1, kWidth), bias = memory.floats(1, kWidth);
        return [=, &backend] {
            restore(backend, x0, x);
            backend.linear(heads, weight, bias, out);
            backend.add(x, out);
            backend.norm(kind, x, of_norm, bias, 1e-5f, out);
            backend.linear(heads, weight, {}, other);
            backend.add(x, other);
            backend.norm(kind, out, of_norm, {}, 1e-5f, out);
            backend.linear(heads.rows_of(0, 1), weight, {}, other.rows_of(0, 1));
            backend.add(x, other.rows_of(0, 1));  // to all rows
            backend.norm(kind, x, of_norm, {}, 1e-5f, out);
            backend.linear(heads, weight, {}, other);
            backend.add(x, other);  // the last call of a step
        };
    };
}

/// Products of what has just been normed: two types beside each other, one that is added to another sum; and
/// what no block may norm for itself, since products go to where the row was, or are added there.
Make normed_for_products(DType dtype, DType other, NormKind kind, int64_t tokens) {
    return [=](Backend& backend, Memory& memory) -> Calls {
        const Tensor x0 = memory.floats(tokens, kWidth), x = memory.floats(tokens, kWidth);
        const Tensor n = memory.floats(tokens, kWidth), sum = memory.floats(tokens, kWidth);
        const Tensor of_norm = memory.floats(1, kWidth), bias = memory.floats(1, kWidth);
        const auto product = [&](DType of, const Tensor& out) {
            return Product{memory.weight(of, out.cols, kWidth), bias.cols_of(0, out.cols), out};
        };
        const auto rows = [&](int64_t cols) { return memory.floats(tokens, cols); };
        const Product q = product(dtype, rows(40)), k = product(other, rows(72)), v = product(dtype, rows(8));
        const Product gate = product(dtype, rows(136)), up = product(dtype, rows(136));
        const Product down = product(dtype, rows(kWidth)), back = product(dtype, x);
        return [=, &backend] {
            const auto norm = [&](Tensor of_bias) { backend.norm(kind, x, of_norm, of_bias, 1e-5f, n); };
            restore(backend, x0, x);
            restore(backend, x0, sum);
            norm(bias);
            const Product three[] = {q, k, v}, two[] = {gate, up};
            backend.linear(n, three);
            norm({});
            backend.linear(n, two);
            backend.gate(Activation::silu, gate.out, up.out);
            norm(bias);
            backend.linear(n, {&back, 1});  // to where the row was
            norm(bias);
            backend.linear(n, {&down, 1});
            backend.add(sum, down.out);
            norm({});
            backend.linear(n, {&down, 1});
            backend.add(x, down.out);  // there too
            backend.norm(kind, x, of_norm, {}, 1e-5f, x);
            backend.linear(x, {&q, 1});  // normed in place
            norm({});                    // nobody's
        };
    };
}

}  // namespace

int main() {
    for (const DType dtype : {DType::F32, DType::F16, DType::BF16, DType::Q8, DType::FP8_E4M3, DType::Q4})
        for (const int heads : {kHeads, 1})
            expect_same("rows that rotate and are stored", rotated_and_stored(dtype, heads == 1, heads));
    for (const NormKind kind : {NormKind::rms, NormKind::layer})
        for (const bool in_place : {false, true})
            expect_same("sums that are normed", summed_and_normed(kind, in_place));
    for (const DType dtype : {DType::F16, DType::BF16, DType::Q8_0, DType::Q4_0, DType::Q5_1, DType::Q2_K,
                              DType::Q3_K, DType::Q4_K, DType::Q6_K, DType::IQ4_NL})
        for (const int64_t tokens : {1, 2, 3}) {
            expect_same("a gate with biases", gated(dtype, Activation::gelu_tanh, 40, 40, tokens, true));
            expect_same("a product that is added and normed", added_and_normed(dtype, NormKind::rms, tokens));
        }
    for (const int64_t tokens : {1, 2, 3, 5, 9})
        for (const NormKind kind : {NormKind::rms, NormKind::layer}) {
            expect_same("norms of what is multiplied",
                        normed_for_products(DType::Q4_K, DType::Q6_K, kind, tokens));
            expect_same("norms of what is multiplied, 16 bits",
                        normed_for_products(DType::F16, DType::Q8_0, kind, tokens));
        }
    expect_same("norms of what floats multiply",
                normed_for_products(DType::Q4_K, DType::F32, NormKind::rms, 1));
    for (const DType dtype : {DType::Q8_0, DType::Q4_K})  // two tiles a warp
        expect_same("a gate of many rows", gated(dtype, Activation::silu, 136, 136, 1, false));
    expect_same("a product with a mean", added_and_normed(DType::Q4_K, NormKind::layer, 2));
    expect_same("a product of floats", added_and_normed(DType::F32, NormKind::rms, 1));
    expect_same("a gate of another size", gated(DType::F16, Activation::silu, 40, 48, 1, false));
    expect_same("a gate of many tokens", gated(DType::F16, Activation::silu, 40, 40, 9, false));
    expect_same("a gate of floats", gated(DType::F32, Activation::silu, 40, 40, 1, true));
    return failures != 0;
}
