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
    Vector(int64_t rows, int64_t columns, double size) : values(rows * columns) {
        for (float& x : values) x = float(size * normal());
        tensor = Tensor(values.data(), DType::F32, rows, columns);
    }
    Vector(const Vector&) = delete;
};

using Numbers = std::vector<std::vector<std::vector<double>>>;  // [sequence][position]

Tensor maybe(bool there, const Vector& v) { return there ? v.tensor : Tensor{}; }

/// A case's rows and queries, what the kernels make of them, and what that should be.
class Run {
  public:
    Run(const Case& c, int capability);
    void call();
    void compare();
    /// The largest error, as a share of its bound.
    double report();

  private:
    std::vector<std::vector<int32_t>> shuffled_tables();
    void fill(Plane& plane, Numbers& to, double size, double offset = 0);
    void fill_table();
    std::vector<ScoreTerm> score_terms() const;
    double expected_score(int s, int h, const double* row, double factor, int64_t at);
    void compare_head(int s, int h);
    void compare_values(const std::vector<double>& p, const std::vector<const double*>& rows,
                        const float* got, const float* before, int width);

    const Case& c;
    const int capability;
    const int n = int(c.ends.size()), shift = 1, tokens = n + shift, rank = std::max(c.rank, 4);
    const int64_t longest = *std::max_element(c.ends.begin(), c.ends.end());
    const float scaling = 1.1f;
    int blocks = 0;
    const std::vector<std::vector<int32_t>> tables = shuffled_tables();
    Plane plane{c.type, c.width, c.stored_heads, blocks}, residual{c.rank_type, rank, 1, blocks},
        factor{DType::F32, 1, 1, blocks};
    Numbers rows, residuals, factors;
    Vector fresh{tokens, c.width, 1}, fresh_residual{tokens, rank, 1}, fresh_factor{tokens, 1, 1};
    Vector q{tokens, int64_t(c.heads) * (c.dim + 16), 1.5 / std::sqrt(c.dim)},
        wide_q{tokens, int64_t(c.heads) * c.width, 1.5 / std::sqrt(c.width)};
    Vector scale{1, c.kv* c.dim, 1}, bias{1, c.kv* c.dim, 1}, table{longest + 1, std::max(c.n_rot, 4), 1},
        relative{c.heads, longest + 1, 1};
    Vector sinks{1, c.heads, 1};
    Vector out{tokens, int64_t(c.heads) * (c.width + c.gap), 1},
        out_residual{tokens, int64_t(c.heads) * (rank + c.gap), 1}, lse{tokens, c.heads, 1};
    const std::vector<float> old = out.values, old_residual = out_residual.values, old_lse = lse.values;
    std::vector<AttentionSequence> sequences;
    std::vector<cuda::PlacedSequence> placed;
    double worst = 0, largest = 0, worst_lse = 0;
    double reach = 0;  // the largest sqrt(sum (q_i k_i)^2) of a score
};

Run::Run(const Case& c, int capability) : c(c), capability(capability) {
    fill(plane, rows, 1);
    if (c.rank) fill(residual, residuals, 0.25);
    if (c.factors) fill(factor, factors, 1, 1);
    fill_table();
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
}

std::vector<std::vector<int32_t>> Run::shuffled_tables() {
    for (const int64_t end : c.ends) blocks += int(end / kBlock) + 1;
    std::vector<int32_t> numbers(blocks);
    for (int i = 0; i < blocks; ++i) numbers[i] = i;
    std::shuffle(numbers.begin(), numbers.end(), chance);
    std::vector<std::vector<int32_t>> out;
    for (int next = 0; const int64_t end : c.ends) {
        out.emplace_back();
        for (int64_t i = 0; i <= end / kBlock; ++i) out.back().push_back(numbers[next++]);
    }
    return out;
}

void Run::fill(Plane& to_fill, Numbers& to, double size, double offset) {
    to.resize(n);
    for (int s = 0; s < n; ++s)
        for (int64_t i = 0; i < c.ends[s]; ++i) {
            to[s].emplace_back();
            if (i < c.begins[s]) continue;
            to[s].back() = to_fill.fill(tables[s].data(), i, size);
            if (offset == 0) continue;
            float* const only = reinterpret_cast<float*>(to_fill.data(tables[s].data(), i, 0));
            *only = float(offset + 0.1 * *only);
            to[s].back()[0] = *only;
        }
}

constexpr double kRopeScale = 1.25;

double angle_of(const Case& c, int64_t position, int pair) {
    return double(position) * std::pow(10000.0, -2.0 * pair / c.n_rot);
}

void Run::fill_table() {
    for (int64_t p = 0; p <= longest; ++p)
        for (int i = 0; i < c.n_rot / 2; ++i) {
            table.tensor.f32(p)[2 * i] = float(kRopeScale * std::cos(angle_of(c, p, i)));
            table.tensor.f32(p)[2 * i + 1] = float(kRopeScale * std::sin(angle_of(c, p, i)));
        }
}

std::vector<ScoreTerm> Run::score_terms() const {
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
    return scores;
}

void Run::call() {
    const std::vector<ScoreTerm> scores = score_terms();
    std::vector<ValueTerm> values = {{plane.rows, maybe(c.fresh, fresh), 1, c.width, out.tensor}};
    if (c.rank) values.push_back({residual.rows, fresh_residual.tensor, 1, c.rank, out_residual.tensor});
    const AttentionArgs args{.sequences = sequences,
                             .scores = scores,
                             .values = values,
                             .n_heads = c.heads,
                             .scale = scaling,
                             .score_cap = c.cap,
                             .window = c.window,
                             .relative_bias = maybe(c.relative, relative),
                             .relative_origin = longest,
                             .sinks = maybe(c.sinks, sinks),
                             .lse = maybe(c.lse, lse),
                             .merge = c.merge};
    cuda::Device device{
        .capability = capability, .processors = c.processors, .shared_bytes = size_t(c.kib) << 10};
    for (int size = 1; size <= cuda::kMaxCluster; ++size) device.clusters[size] = c.processors / size;
    if (!cuda::absorbed_can(device, args))
        std::printf("sm_%d %s: refused\n", capability, c.name), std::exit(1);
    void* workspace = nullptr;
    const size_t bytes = cuda::absorbed_workspace(device, args);
    cuda::check(cudaMalloc(&workspace, bytes), "allocating a workspace");
    cuda::check(cudaMemset(workspace, 0xff, bytes), "filling it");
    cuda::absorbed(device, args, placed.data(), int(placed.size()), shift,
                   static_cast<std::byte*>(workspace));
    cuda::check(cudaDeviceSynchronize(), "waiting for kernels");
    cuda::check(cudaFree(workspace), "freeing it");
}

double Run::expected_score(int s, int h, const double* row, double row_factor, int64_t at) {
    double sum = 0, squares = 0;
    const auto add = [&](double product) {
        sum += product;
        squares += product * product;
    };
    const int token = s + shift, first = h / (c.heads / c.kv) * c.dim;
    for (int i = 0; i < c.width && c.wide; ++i) add(row[i] * wide_q.tensor.f32(token)[h * c.width + i]);
    std::vector<double> k(c.dim);
    for (int i = 0; i < c.dim && c.by_heads; ++i) {
        k[i] = row[first + i];
        if (c.row_scale) k[i] *= scale.values[first + i] * row_factor;
        if (c.bias) k[i] += bias.values[first + i];
    }
    for (int i = 0; i < c.n_rot / 2; ++i) {
        double &a = k[c.interleaved ? 2 * i : i], &b = k[c.interleaved ? 2 * i + 1 : i + c.n_rot / 2];
        const double x = a, y = b, cosine = std::cos(angle_of(c, at, i)), sine = std::sin(angle_of(c, at, i));
        a = kRopeScale * (cosine * x - sine * y);
        b = kRopeScale * (sine * x + cosine * y);
    }
    for (int i = 0; i < c.dim && c.by_heads; ++i) add(k[i] * q.tensor.f32(token)[h * (c.dim + 16) + i]);
    reach = std::max(reach, scaling * std::sqrt(squares));
    const double score = c.cap > 0 ? c.cap * std::tanh(scaling * sum / c.cap) : scaling * sum;
    return score + (c.relative ? relative.tensor.f32(h)[longest + at - sequences[s].position] : 0);
}

void Run::compare_values(const std::vector<double>& p, const std::vector<const double*>& of, const float* got,
                         const float* before, int width) {
    for (int i = width; i < width + c.gap; ++i)
        if (got[i] != before[i]) worst = INFINITY;
    for (int i = 0; i < width; ++i) {
        double expected = 0;
        for (size_t j = 0; j < p.size(); ++j) expected += p[j] * of[j][i];
        const double error = std::fabs(got[i] - expected);
        worst = std::isnan(error) ? INFINITY : std::max(worst, error);
        largest = std::max(largest, std::fabs(expected));
    }
}

void Run::compare_head(int s, int h) {
    const int token = s + shift;
    const int64_t position = sequences[s].position;
    const int64_t begin = c.window ? std::max(c.begins[s], position - c.window + 1) : c.begins[s];
    std::vector<double> p;
    std::vector<const double*> row, rest;
    for (int64_t i = begin; i < c.ends[s]; ++i) {
        p.push_back(expected_score(s, h, rows[s][i].data(), c.factors ? factors[s][i][0] : 1, i));
        row.push_back(rows[s][i].data());
        if (c.rank) rest.push_back(residuals[s][i].data());
    }
    const std::vector<double> own(fresh.tensor.f32(token), fresh.tensor.f32(token) + c.width);
    const float* const own_residual = fresh_residual.tensor.f32(token);
    const std::vector<double> own_rest(own_residual, own_residual + rank);
    if (c.fresh) {
        p.push_back(expected_score(s, h, own.data(), c.factors ? fresh_factor.values[token] : 1, position));
        row.push_back(own.data());
        rest.push_back(own_rest.data());
    }
    const int64_t at = (int64_t(token) * c.heads + h) * (c.width + c.gap),
                  at_residual = (int64_t(token) * c.heads + h) * (rank + c.gap);
    const std::vector<double> old_row(old.begin() + at, old.begin() + at + c.width),
        old_rest(old_residual.begin() + at_residual, old_residual.begin() + at_residual + rank),
        nothing(c.width + rank);
    const auto also = [&](double score, const std::vector<double>& of_row,
                          const std::vector<double>& of_rest) {
        p.push_back(score);
        row.push_back(of_row.data());
        rest.push_back(of_rest.data());
    };
    if (c.merge) also(old_lse[token * c.heads + h], old_row, old_rest);
    if (c.sinks) also(sinks.values[h], nothing, nothing);
    const double high = p.empty() ? 0 : *std::max_element(p.begin(), p.end());
    double total = 0;
    for (double& x : p) total += x = std::exp(x - high);
    for (double& x : p) x /= total;
    compare_values(p, row, &out.values[at], &old[at], c.width);
    if (c.rank)
        compare_values(p, rest, &out_residual.values[at_residual], &old_residual[at_residual], c.rank);
    const double expected = high + std::log(total), got = lse.tensor.f32(token)[h];
    if (expected == got || !c.lse) return;  // both -inf where there is no row
    worst_lse = std::isnan(got) ? INFINITY : std::max(worst_lse, std::fabs(got - expected));
}

void Run::compare() {
    for (int s = 0; s < n; ++s)
        for (int h = 0; h < c.heads; ++h) compare_head(s, h);
}

double Run::report() {
    // Weights and keys are rounded once and up to four times, each time by at most u of themselves; errors of
    // keys add up like random numbers, of which none among all rows is beyond four deviations (2 u / sqrt 3
    // of `reach` each).
    const double u = 0x1p-12;
    const double bound = (c.type == DType::BF16 ? 0x1p-9 : u) + 4 * 2 / std::sqrt(3.0) * u * reach;
    worst /= largest;
    std::printf("sm_%d %-34s error %.1e of the largest, of lse %.1e, bound %.1e\n", capability, c.name, worst,
                worst_lse, bound);
    return std::max(worst, worst_lse) / bound;
}

}  // namespace

int main(int argc, char** argv) {
    bool good = true;
    for (const int capability : {90, 80})  // clusters; teams of blocks that write to each other
        for (const Case& c : cases)
            if (argc < 2 || std::strstr(c.name, argv[1])) {
                Run run(c, capability);
                run.call();
                run.compare();
                good &= run.report() <= 1;
            }
    return good ? 0 : 1;
}
