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

#include "absorbed_cases.h"
#include "absorbed_rows.h"

namespace slimrt::cuda {
void check(cudaError_t result, const char* what) {
    if (result != cudaSuccess) std::printf("failed: %s\n", what), std::exit(1);
}
}  // namespace slimrt::cuda

namespace {

using namespace absorbed_test;

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

}  // namespace

int main(int argc, char** argv) {
    bool good = true;
    for (const Case& c : cases)
        if (argc < 2 || std::strstr(c.name, argv[1])) good &= Run(c).compute() <= 1;
    return good ? 0 : 1;
}
