// Absorbed attention of the CUDA kernels, on the host's emulator of them, against float64: what no model's
// step brings about in one place (sequences of unequal length with gaps before and after their rows, which
// hold NaN, every type of row beside every kind of term). Prints the largest error of each case; exits 1
// beyond the bounds.
#include "kernels/cuda/absorbed.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numbers>
#include <random>
#include <string>
#include <vector>

namespace slimrt::cuda {
void check(cudaError_t result, const char* what) {
    if (result != cudaSuccess) std::printf("failed: %s\n", what), std::exit(1);
}
}  // namespace slimrt::cuda

namespace {

using namespace slimrt;
constexpr int kBlock = 32;
std::mt19937 chance(5);

double normal() { return std::normal_distribution<double>()(chance); }
int below(int n) { return int(chance() % unsigned(n)); }

double f16_number(uint16_t bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const double size = exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
    return bits & 0x8000 ? -size : size;
}
uint16_t f16_of(double x) {  // nearest; normal numbers only
    int exponent;
    const double part = std::frexp(std::fabs(x), &exponent);
    if (exponent < -13) return 0;
    const long mantissa = std::lround(std::ldexp(part, 11)) - 1024;
    return uint16_t((x < 0 ? 0x8000 : 0) | (((exponent + 14) << 10) + mantissa));
}
double bf16_number(uint16_t bits) {
    const uint32_t word = uint32_t{bits} << 16;
    float x;
    std::memcpy(&x, &word, 4);
    return x;
}

/// A plane of several sequences' rows in shuffled blocks; what is in no row is NaN.
struct Plane {
    Rows rows;
    HeadBytes head;
    std::vector<uint8_t> memory;
    uint8_t* base;

    Plane(DType type, int width, int heads, int blocks)
        : head(head_bytes(type, width / heads)), memory(head.total() * heads * kBlock * blocks + 128, 0xff) {
        base = memory.data() + (128 - reinterpret_cast<uintptr_t>(memory.data()) % 128) % 128;
        rows = {.base = reinterpret_cast<std::byte*>(base),
                .dtype = type,
                .width = width,
                .heads = heads,
                .block_stride = head.total() * heads * kBlock,
                .block_tokens = kBlock};
    }
    uint8_t* data(const int32_t* table, int64_t at, int of) const {
        return base + table[at / kBlock] * rows.block_stride + of * head.total() * kBlock +
               at % kBlock * head.elements;
    }
    uint8_t* scales(const int32_t* table, int64_t at, int of) const {
        return base + table[at / kBlock] * rows.block_stride + (of * head.total() + head.elements) * kBlock +
               at % kBlock * head.scales;
    }
    /// Random numbers into a row, and what it then holds.
    std::vector<double> fill(const int32_t* table, int64_t at, double size) {
        std::vector<double> out;
        for (int of = 0; of < rows.heads; ++of) {
            uint8_t *to = data(table, at, of), *scale = scales(table, at, of);
            const int n = rows.head_dim();
            const float step = float(size * (0.5 + 0.01 * below(100)) / 50);
            const float power = std::ldexp(1.0f, below(3) + int(std::log2(size)));
            if (rows.dtype == DType::Q8) std::memcpy(scale, &step, 4);
            if (rows.dtype == DType::FP8_E4M3) std::memcpy(scale, &power, 4);
            for (int i = 0; i < n; ++i) {
                const uint16_t half = f16_of(size * normal());
                const float single = float(size * normal());
                const uint8_t byte = uint8_t(below(256));
                uint32_t word;
                std::memcpy(&word, &single, 4);
                const uint16_t brain = uint16_t(word >> 16);
                switch (rows.dtype) {
                    case DType::F16:
                        std::memcpy(to + 2 * i, &half, 2);
                        out.push_back(f16_number(half));
                        break;
                    case DType::BF16:
                        std::memcpy(to + 2 * i, &brain, 2);
                        out.push_back(bf16_number(brain));
                        break;
                    case DType::Q8:
                        to[i] = byte;
                        out.push_back(int8_t(byte) * double(step));
                        break;
                    case DType::FP8_E4M3: {
                        const uint8_t code = (byte & 0x7f) == 0x7f ? 3 : byte;
                        const int e = code >> 3 & 15, m = code & 7;
                        const double x = e ? std::ldexp(8 + m, e - 10) : std::ldexp(m, -9);
                        to[i] = code;
                        out.push_back((code & 128 ? -x : x) * power / 256);
                        break;
                    }
                    case DType::FP8_E5M2: {
                        const uint8_t code = uint8_t(half >> 8);
                        to[i] = code;
                        out.push_back(f16_number(uint16_t(code << 8)));
                        break;
                    }
                    default: {  // Q4
                        const int group = i / 32, in = i % 32,
                                  half_of = (std::min(32, n - group * 32) + 1) / 2;
                        uint8_t& both = to[group * 16 + (in < half_of ? in : in - half_of)];
                        const uint16_t scale_bits = f16_of(size / 5), least = f16_of(-size * 1.5);
                        std::memcpy(scale + 4 * group, &scale_bits, 2);
                        std::memcpy(scale + 4 * group + 2, &least, 2);
                        if (in == 0) std::memset(to + group * 16, 0, half_of);
                        both |= uint8_t(in < half_of ? byte & 15 : (byte & 15) << 4);
                        out.push_back(f16_number(scale_bits) * (byte & 15) + f16_number(least));
                        break;
                    }
                    case DType::F32:
                        std::memcpy(to + 4 * i, &single, 4);
                        out.push_back(single);
                }
            }
        }
        return out;
    }
};

struct Case {
    const char* name;
    DType type = DType::BF16;
    int heads = 4, kv = 4, dim = 16, stored_heads = 1, width = 64;
    bool by_heads = true, wide = false;
    int n_rot = 0;
    bool interleaved = false, row_scale = false, bias = false, factors = false;
    int rank = 0;
    DType rank_type = DType::F16;
    int64_t window = 0;
    bool relative = false, fresh = true, lse = true;
    std::vector<int64_t> ends = {33, 100}, begins = {0, 0, 0, 0, 0, 0, 0};
    int processors = 132, kib = 227;  // of the device: less shared memory makes larger clusters
};

struct Vector {
    std::vector<float> values;
    Tensor tensor;
    Vector() = default;
    Vector(int64_t rows, int64_t columns, double size) : values(rows * columns) {
        for (float& x : values) x = float(size * normal());
        tensor = Tensor(values.data(), DType::F32, rows, columns);
    }
};

struct Run {
    const Case& c;
    int n = int(c.ends.size()), shift = 1, blocks = 0;
    std::vector<std::vector<int32_t>> tables;
    std::vector<std::vector<std::vector<double>>> rows, residuals, factors;  // [sequence][position]

    explicit Run(const Case& c) : c(c) {
        for (const int64_t end : c.ends) blocks += int(end / kBlock) + 1;
        std::vector<int32_t> numbers(blocks);
        for (int i = 0; i < blocks; ++i) numbers[i] = i;
        std::shuffle(numbers.begin(), numbers.end(), chance);
        int next = 0;
        for (const int64_t end : c.ends) {
            tables.emplace_back();
            for (int64_t i = 0; i <= end / kBlock; ++i) tables.back().push_back(numbers[next++]);
        }
    }
    void fill(Plane& plane, std::vector<std::vector<std::vector<double>>>& to, double size,
              double offset = 0) {
        to.resize(n);
        for (int s = 0; s < n; ++s)
            for (int64_t i = 0; i < c.ends[s]; ++i) {
                to[s].emplace_back();
                if (i < c.begins[s]) continue;
                to[s].back() = plane.fill(tables[s].data(), i, size);
                if (offset == 0) continue;
                float* const only = reinterpret_cast<float*>(plane.data(tables[s].data(), i, 0));
                *only = float(offset + 0.1 * *only);
                to[s].back()[0] = *only;
            }
    }
    double compute();
    double reach = 0;  // the largest sqrt(sum (q_i k_i)^2) of a score
};

double Run::compute() {
    const int tokens = n + shift, term_width = c.kv * c.dim;
    Plane plane(c.type, c.width, c.stored_heads, blocks),
        residual(c.rank_type, std::max(c.rank, 4), 1, blocks), factor(DType::F32, 1, 1, blocks);
    fill(plane, rows, 1);
    if (c.rank) fill(residual, residuals, 0.25);
    if (c.factors) fill(factor, factors, 1, 1);
    const double q_size = 1.5 / std::sqrt(c.dim), wide_size = 1.5 / std::sqrt(c.width);
    Vector fresh(tokens, c.width, 1), fresh_residual(tokens, std::max(c.rank, 4), 1),
        fresh_factor(tokens, 1, 1);
    Vector q(tokens, int64_t(c.heads) * (c.dim + 16), q_size),
        wide_q(tokens, int64_t(c.heads) * c.width, wide_size);
    Vector scale(1, term_width, 1), bias(1, term_width, 1), out(tokens, int64_t(c.heads) * c.width, 1),
        out_residual(tokens, int64_t(c.heads) * std::max(c.rank, 4), 1), lse(tokens, c.heads, 1);
    const int64_t longest = *std::max_element(c.ends.begin(), c.ends.end());
    Vector table(longest + 1, std::max(c.n_rot, 4), 1), relative(c.heads, longest + 1, 1);
    for (int64_t p = 0; p <= longest; ++p)
        for (int i = 0; i < c.n_rot / 2; ++i) {
            const double angle = double(p) * std::pow(10000.0, -2.0 * i / c.n_rot);
            table.tensor.f32(p)[2 * i] = float(1.25 * std::cos(angle));
            table.tensor.f32(p)[2 * i + 1] = float(1.25 * std::sin(angle));
        }

    std::vector<AttentionSequence> sequences;
    std::vector<cuda::PlacedSequence> placed;
    for (int s = 0; s < n; ++s) {
        sequences.push_back({.query = s,
                             .n_queries = 1,
                             .position = c.fresh ? c.ends[s] : 0,
                             .begin = c.begins[s],
                             .end = c.ends[s],
                             .fresh = c.fresh,
                             .table = tables[s].data(),
                             .causal = c.fresh});
        placed.push_back(
            {tables[s].data(), sequences[s].position, c.begins[s], c.ends[s], s, 1, c.fresh, c.fresh});
    }
    const auto maybe = [](bool there, const Vector& v) { return there ? v.tensor : Tensor{}; };
    std::vector<ScoreTerm> scores;
    if (c.by_heads)
        scores.push_back({.stored = plane.rows,
                          .fresh = maybe(c.fresh, fresh),
                          .n_heads = c.kv,
                          .dim = c.dim,
                          .q = q.tensor,
                          .row_scale = maybe(c.row_scale, scale),
                          .factors = c.factors ? factor.rows : Rows{},
                          .fresh_factors = maybe(c.factors, fresh_factor),
                          .bias = maybe(c.bias, bias),
                          .rope = {maybe(c.n_rot, table), c.n_rot, c.interleaved}});
    if (c.wide)
        scores.push_back({.stored = plane.rows,
                          .fresh = maybe(c.fresh, fresh),
                          .n_heads = 1,
                          .dim = c.width,
                          .q = wide_q.tensor});
    std::vector<ValueTerm> values = {{plane.rows, maybe(c.fresh, fresh), 1, c.width, out.tensor}};
    if (c.rank) values.push_back({residual.rows, fresh_residual.tensor, 1, c.rank, out_residual.tensor});
    if (c.rank)
        values[1].out = Tensor(out_residual.values.data(), DType::F32, tokens, int64_t(c.heads) * c.rank);
    if (c.rank) values[1].fresh = Tensor(fresh_residual.values.data(), DType::F32, tokens, c.rank);
    const float scaling = 1.1f;
    const AttentionArgs args{.sequences = sequences,
                             .scores = scores,
                             .values = values,
                             .n_heads = c.heads,
                             .scale = scaling,
                             .window = c.window,
                             .relative_bias = maybe(c.relative, relative),
                             .relative_origin = longest,
                             .lse = maybe(c.lse, lse)};
    const cuda::Device device{
        .capability = 90, .processors = c.processors, .shared_bytes = size_t(c.kib) << 10};
    if (!cuda::absorbed_can(device, args)) std::printf("%s: refused\n", c.name), std::exit(1);
    std::vector<std::byte> workspace(cuda::absorbed_workspace(device, args) + 16, std::byte{0xff});
    std::byte* const aligned =
        workspace.data() + (16 - reinterpret_cast<uintptr_t>(workspace.data()) % 16) % 16;
    cuda::absorbed(device, args, placed.data(), shift, aligned);
    cuda::check(cudaDeviceSynchronize(), "waiting for kernels");

    double worst = 0, largest = 0, worst_lse = 0;
    const auto compare = [&](float got, double expected) {
        const double error = std::fabs(got - expected);
        worst = std::isnan(error) ? INFINITY : std::max(worst, error);
        largest = std::max(largest, std::fabs(expected));
    };
    for (int s = 0; s < n; ++s) {
        const int token = s + shift;
        const int64_t position = sequences[s].position;
        const int64_t begin = c.window ? std::max(c.begins[s], position - c.window + 1) : c.begins[s];
        for (int h = 0; h < c.heads; ++h) {
            std::vector<double> p;
            std::vector<const double*> row, rest;
            const auto score = [&](const double* of, double row_factor, int64_t at) {
                double sum = 0, squares = 0;
                const auto add = [&](double product) {
                    sum += product;
                    squares += product * product;
                };
                if (c.wide)
                    for (int i = 0; i < c.width; ++i) add(of[i] * wide_q.tensor.f32(token)[h * c.width + i]);
                const int first = h / (c.heads / c.kv) * c.dim;
                std::vector<double> k(c.dim);
                for (int i = 0; i < c.dim && c.by_heads; ++i) {
                    k[i] = of[first + i];
                    if (c.row_scale) k[i] *= scale.values[first + i] * row_factor;
                    if (c.bias) k[i] += bias.values[first + i];
                }
                for (int i = 0; i < c.n_rot / 2; ++i) {
                    const int a = c.interleaved ? 2 * i : i, b = c.interleaved ? 2 * i + 1 : i + c.n_rot / 2;
                    const double angle = double(at) * std::pow(10000.0, -2.0 * i / c.n_rot);
                    const double x = k[a], y = k[b];
                    k[a] = 1.25 * (std::cos(angle) * x - std::sin(angle) * y);
                    k[b] = 1.25 * (std::sin(angle) * x + std::cos(angle) * y);
                }
                for (int i = 0; i < c.dim && c.by_heads; ++i)
                    add(k[i] * q.tensor.f32(token)[h * (c.dim + 16) + i]);
                sum *= scaling;
                reach = std::max(reach, scaling * std::sqrt(squares));
                return c.relative ? sum + relative.tensor.f32(h)[longest + at - position] : sum;
            };
            for (int64_t i = begin; i < c.ends[s]; ++i) {
                p.push_back(score(rows[s][i].data(), c.factors ? factors[s][i][0] : 1, i));
                row.push_back(rows[s][i].data());
                if (c.rank) rest.push_back(residuals[s][i].data());
            }
            std::vector<double> own(c.width), own_rest(c.rank);
            if (c.fresh) {
                std::copy_n(fresh.tensor.f32(token), c.width, own.begin());
                std::copy_n(fresh_residual.values.data() + int64_t(token) * c.rank, c.rank, own_rest.begin());
                p.push_back(score(own.data(), c.factors ? fresh_factor.values[token] : 1, position));
                row.push_back(own.data());
                rest.push_back(own_rest.data());
            }
            const double high = p.empty() ? 0 : *std::max_element(p.begin(), p.end());
            double total = 0;
            for (double& x : p) total += x = std::exp(x - high);
            for (int i = 0; i < c.width; ++i) {
                double sum = 0;
                for (size_t j = 0; j < p.size(); ++j) sum += p[j] / total * row[j][i];
                compare(out.tensor.f32(token)[h * c.width + i], sum);
            }
            for (int i = 0; i < c.rank; ++i) {
                double sum = 0;
                for (size_t j = 0; j < p.size(); ++j) sum += p[j] / total * rest[j][i];
                compare(out_residual.values[(int64_t(token) * c.heads + h) * c.rank + i], sum);
            }
            const double expected = high + std::log(total), got = lse.tensor.f32(token)[h];
            if (!(expected == got)) worst_lse = std::max(worst_lse, std::fabs(got - expected));
        }
    }
    // Weights and keys are rounded once and up to four times, each time by at most u of themselves; errors of
    // keys add up like random numbers, of which none among all rows is beyond four deviations (2 u / sqrt 3
    // of `reach` each).
    const double u = 0x1p-12,
                 bound = (c.type == DType::BF16 ? 0x1p-9 : u) + 4 * 2 / std::sqrt(3.0) * u * reach;
    worst /= largest;
    std::printf("%-34s error %.1e of the largest, of lse %.1e, bound %.1e\n", c.name, worst, worst_lse,
                bound);
    return std::max(worst, c.lse ? worst_lse : 0) / bound;
}

const DType bf16 = DType::BF16, f16 = DType::F16, q8 = DType::Q8, e4m3 = DType::FP8_E4M3,
            e5m2 = DType::FP8_E5M2;
const std::vector<int64_t> some = {0, 1, 31, 32, 33, 100, 200};

// Heads of 16 to 128 columns read head by head (modes k and k+r), of a part of them (xr), whole rows (v, x,
// e).
const std::vector<Case> cases = {
    {.name = "k bf16", .n_rot = 16},
    {.name = "k f16 neox, partial",
     .type = f16,
     .heads = 8,
     .kv = 8,
     .dim = 32,
     .width = 256,
     .n_rot = 16,
     .ends = some},
    {.name = "k bf16 cluster, interleaved",
     .heads = 8,
     .kv = 8,
     .dim = 64,
     .width = 512,
     .n_rot = 64,
     .interleaved = true,
     .ends = {33, 200},
     .processors = 8,
     .kib = 48},
    {.name = "k f16 cluster, neox",
     .type = f16,
     .heads = 4,
     .kv = 4,
     .dim = 128,
     .width = 512,
     .n_rot = 128,
     .ends = {64, 150},
     .processors = 8,
     .kib = 48},
    {.name = "k f16 80 columns, biased, window",
     .type = f16,
     .heads = 8,
     .kv = 8,
     .dim = 80,
     .width = 640,
     .n_rot = 32,
     .bias = true,
     .window = 70,
     .ends = {20, 150},
     .begins = {3, 40},
     .processors = 12},
    {.name = "k bf16 no rotation, 20 heads",
     .heads = 20,
     .kv = 20,
     .dim = 32,
     .width = 640,
     .ends = {33, 70},
     .processors = 16,
     .kib = 64},
    {.name = "k bf16 normed, grouped",
     .heads = 12,
     .kv = 4,
     .dim = 32,
     .width = 128,
     .n_rot = 32,
     .row_scale = true,
     .factors = true,
     .ends = some},
    {.name = "k bf16 scaled and biased",
     .heads = 4,
     .kv = 4,
     .dim = 32,
     .width = 128,
     .n_rot = 32,
     .row_scale = true,
     .bias = true},
    {.name = "k q8 cluster",
     .type = q8,
     .heads = 8,
     .kv = 8,
     .dim = 64,
     .stored_heads = 8,
     .width = 512,
     .n_rot = 64,
     .ends = {7, 200},
     .begins = {5, 33},
     .processors = 8,
     .kib = 48},
    {.name = "k e4m3",
     .type = e4m3,
     .heads = 4,
     .kv = 4,
     .dim = 64,
     .stored_heads = 4,
     .width = 256,
     .n_rot = 64},
    {.name = "k e5m2, window",
     .type = e5m2,
     .heads = 4,
     .kv = 4,
     .dim = 64,
     .width = 256,
     .n_rot = 64,
     .window = 50,
     .ends = some},
    {.name = "k e5m2 stored by heads",
     .type = e5m2,
     .heads = 4,
     .kv = 4,
     .dim = 64,
     .stored_heads = 4,
     .width = 256,
     .n_rot = 64},
    {.name = "k f16 stored by heads",
     .type = f16,
     .heads = 4,
     .kv = 4,
     .dim = 64,
     .stored_heads = 4,
     .width = 256,
     .n_rot = 64},
    {.name = "k+r q8, q4",
     .type = q8,
     .heads = 8,
     .kv = 8,
     .dim = 64,
     .width = 512,
     .n_rot = 64,
     .row_scale = true,
     .rank = 100,
     .rank_type = DType::Q4,
     .ends = {33, 100},
     .begins = {0, 50},
     .processors = 8,
     .kib = 64},
    {.name = "k+r f16, f16",
     .type = f16,
     .heads = 8,
     .kv = 8,
     .dim = 64,
     .width = 512,
     .n_rot = 64,
     .rank = 36,
     .ends = {0, 100},
     .processors = 8,
     .kib = 64},
    {.name = "k+r bf16, bf16",
     .heads = 4,
     .kv = 4,
     .dim = 32,
     .width = 128,
     .n_rot = 32,
     .rank = 12,
     .rank_type = bf16},
    {.name = "k+r e4m3, q8, 4 of 8 heads",
     .type = e4m3,
     .heads = 8,
     .kv = 4,
     .dim = 64,
     .width = 256,
     .n_rot = 64,
     .row_scale = true,
     .rank = 72,
     .rank_type = q8,
     .processors = 8,
     .kib = 56},
    {.name = "k 64 heads",
     .type = f16,
     .heads = 64,
     .kv = 64,
     .dim = 16,
     .width = 1024,
     .n_rot = 16,
     .ends = {70},
     .processors = 4},
    {.name = "x bf16, by distance, window",
     .heads = 12,
     .kv = 12,
     .width = 192,
     .by_heads = false,
     .wide = true,
     .window = 90,
     .relative = true,
     .ends = some},
    {.name = "x f16 cluster",
     .type = f16,
     .heads = 32,
     .kv = 32,
     .width = 512,
     .by_heads = false,
     .wide = true,
     .ends = {33, 200},
     .processors = 8,
     .kib = 96},
    {.name = "x bf16 cluster",
     .heads = 20,
     .kv = 20,
     .width = 640,
     .by_heads = false,
     .wide = true,
     .ends = {40, 100},
     .processors = 8,
     .kib = 96},
    {.name = "v e5m2",
     .type = e5m2,
     .heads = 8,
     .kv = 8,
     .width = 128,
     .by_heads = false,
     .wide = true,
     .ends = {5, 70}},
    {.name = "e1 q8 stored by heads",
     .type = q8,
     .heads = 8,
     .kv = 8,
     .stored_heads = 8,
     .width = 256,
     .by_heads = false,
     .wide = true,
     .fresh = false,
     .ends = {0, 70, 129},
     .processors = 8,
     .kib = 64},
    {.name = "e q8",
     .type = q8,
     .heads = 20,
     .kv = 20,
     .width = 320,
     .by_heads = false,
     .wide = true,
     .fresh = false,
     .ends = {1, 150},
     .processors = 8,
     .kib = 90},
    {.name = "xr bf16 cluster",
     .heads = 8,
     .kv = 8,
     .dim = 16,
     .width = 256,
     .wide = true,
     .n_rot = 16,
     .bias = true,
     .ends = {33, 150},
     .processors = 8,
     .kib = 48},
    {.name = "xr q8",
     .type = q8,
     .heads = 32,
     .kv = 32,
     .dim = 16,
     .width = 512,
     .wide = true,
     .n_rot = 16,
     .row_scale = true,
     .ends = {100, 31},
     .processors = 16,
     .kib = 110},
};

}  // namespace

int main(int argc, char** argv) {
    bool good = true;
    for (const Case& c : cases)
        if (argc < 2 || std::strstr(c.name, argv[1])) good &= Run(c).compute() <= 1;
    return good ? 0 : 1;
}
