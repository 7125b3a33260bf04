// Mixture of experts. Pairs of a token and an expert are sorted by expert, so that a weight is read once for
// all of its tokens, by the same kernels as other products.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <span>

#include "kernels/cpu/cpu_backend.h"

namespace slimrt::cpu {
namespace {

constexpr size_t kCacheLine = 64;

size_t lines(size_t bytes) { return chunks(int64_t(bytes), kCacheLine) * kCacheLine; }

/// Offsets of consecutive parts of a workspace, each in whole cache lines.
class Parts {
  public:
    size_t take(size_t bytes) {
        const size_t at = bytes_;
        bytes_ += lines(bytes);
        return at;
    }
    size_t bytes() const { return bytes_; }

  private:
    size_t bytes_ = 0;
};

/// The index of the best score that is not taken, the first of equals; NaN scores come last.
int best_of(std::span<const float> scores, const std::vector<bool>& taken) {
    int best = -1;
    for (int i = 0; i < int(taken.size()); ++i) {
        if (taken[i]) continue;
        if (best < 0 || scores[i] > scores[best] || (std::isnan(scores[best]) && !std::isnan(scores[i])))
            best = i;
    }
    return best;
}

std::vector<float> probabilities(const Router& router, std::span<const float> scores) {
    std::vector<float> p(scores.size());
    const auto each = [&](auto value) { std::transform(scores.begin(), scores.end(), p.begin(), value); };
    if (router.sigmoid) {
        each([](float s) { return 1 / (1 + std::exp(-s)); });
        return p;
    }
    const float high = scores[best_of(scores, std::vector<bool>(p.size()))];
    each([&](float s) { return std::exp(s - high); });
    const float sum = std::accumulate(p.begin(), p.end(), 0.0f);
    for (float& share : p) share /= sum;
    return p;
}

/// The share of the best expert among those that are left and near it (SparseMixer).
float share_among_near(float near, std::span<const float> scores, const std::vector<bool>& taken, int best) {
    const float high = scores[best];
    float sum = 0;
    for (size_t i = 0; i < scores.size(); ++i)
        if (!taken[i] && !((high - scores[i]) / std::max(std::abs(scores[i]), high) > near))
            sum += std::exp(scores[i] - high);
    return 1 / sum;
}

/// Group-limited routing (DeepSeek-V3): marks the experts outside the best groups.
std::vector<bool> outside_groups(const Router& router, std::span<const float> by) {
    const size_t size = by.size() / router.groups;
    std::vector<float> of_group;
    for (int g = 0; g < router.groups; ++g) {
        const auto group = by.subspan(g * size, size);
        std::vector<bool> counted(size);
        const int best = best_of(group, counted);
        of_group.push_back(group[best]);
        counted[best] = true;
        if (router.sigmoid && size > 1) of_group.back() += group[best_of(group, counted)];
    }
    std::vector<bool> chosen(router.groups), outside(by.size());
    for (int j = 0; j < router.groups_used; ++j) chosen[best_of(of_group, chosen)] = true;
    for (size_t i = 0; i < outside.size(); ++i) outside[i] = !chosen[i / size];
    return outside;
}

}  // namespace

void CpuBackend::route(const Router& router, Tensor scores, Tensor bias, Tensor ids, Tensor shares) {
    each_row(scores.rows, scores.cols * ids.cols, [&](int64_t row, int) {
        const std::span<const float> s(scores.f32(row), size_t(scores.cols));
        const std::vector<float> p = probabilities(router, s);
        // Ordered as their softmax, where some may round to equal.
        std::vector<float> by(s.begin(), s.end());
        if (router.sigmoid || bias)
            for (size_t i = 0; i < by.size(); ++i) by[i] = p[i] + (bias ? bias.f32()[i] : 0.0f);
        std::vector<bool> taken = outside_groups(router, by);
        float sum = kLeastShares;
        for (int64_t j = 0; j < ids.cols; ++j) {
            const int id = best_of(by, taken);
            sum += shares.f32(row)[j] = router.near > 0 ? share_among_near(router.near, s, taken, id) : p[id];
            taken[id] = true;
            ids.i32(row)[j] = id;
        }
        const float factor = router.renormalised ? router.scale / sum : router.scale;
        for (int64_t j = 0; j < ids.cols; ++j) shares.f32(row)[j] *= factor;
    });
}

/// Pairs (token i, choice j) = i * taken + j, sorted by expert.
struct CpuBackend::SortedPairs {
    struct Of {
        int expert;
        int64_t first, n;  // positions in `pair`
    };
    std::vector<int32_t> pair;   // the pair at each position
    std::vector<int32_t> place;  // the position of each pair
    std::vector<Of> experts;     // those that some token takes

    SortedPairs(Tensor ids, int n_experts) : pair(ids.rows * ids.cols), place(pair.size()) {
        std::vector<int64_t> end(n_experts + 1);
        const auto expert = [&](int64_t p) { return ids.i32(p / ids.cols)[p % ids.cols]; };
        for (size_t p = 0; p < pair.size(); ++p) ++end[expert(p) + 1];
        std::partial_sum(end.begin(), end.end(), end.begin());
        for (int e = 0; e < n_experts; ++e)
            if (end[e + 1] > end[e]) experts.push_back({e, end[e], end[e + 1] - end[e]});
        for (size_t p = 0; p < pair.size(); ++p) pair[place[p] = int32_t(end[expert(p)]++)] = int32_t(p);
    }
};

/// A product of all pairs: out [pairs, rows of an expert], in sorted order; the pair at a position reads row
/// pair / share of x.
struct CpuBackend::SortedProduct {
    Tensor weight;  // weight rows, from the first expert on
    int64_t step;   // rows from one expert to the next
    Tensor x;
    int64_t share;
    Tensor out;
    std::byte* packed;  // pairs * max_packed_stride()
};

size_t CpuBackend::max_packed_stride(DType dtype, int64_t n_tokens, int64_t k) const {
    size_t most = lines(k * sizeof(float));
    for (const LinearKernel* kernel = isa_.linear; kernel->product; ++kernel)
        if (kernel->weight_type == number(dtype) && n_tokens >= kernel->min_tokens)
            most = std::max(most, packed_stride(*kernel, n_tokens, k));
    return most;
}

void CpuBackend::multiply_sorted(const SortedPairs& pairs, std::span<const SortedProduct> products) {
    struct Item {
        const SortedProduct* product;
        const SortedPairs::Of* of;
        int64_t first, rows;  // rows of the expert
    };
    const int64_t k = products[0].weight.cols, rows = products[0].out.cols;
    const auto kernel_of = [&](const SortedProduct& p, const SortedPairs::Of& of) {
        return find_kernel(p.weight.dtype, of.n);
    };
    const auto stride_of = [&](const LinearKernel& kernel, int64_t n) {
        const size_t stride = packed_stride(kernel, n, k);
        return stride ? stride : lines(k * sizeof(float));
    };
    const auto packed_at = [&](const SortedProduct& p, const SortedPairs::Of& of) {
        return p.packed + of.first * max_packed_stride(p.weight.dtype, int64_t(pairs.pair.size()), k);
    };
    const int64_t all = int64_t(pairs.experts.size() * products.size()) * rows;
    const int64_t share = std::max(kPanelRows, all / (4 * n_threads_) / kPanelRows * kPanelRows);
    std::vector<Item> items;
    for (const SortedProduct& p : products) {
        const bool packed = &p > products.data() && p.packed == products[0].packed;
        for (const SortedPairs::Of& of : pairs.experts) {
            for (int64_t i = of.first; observer_ && i < of.first + of.n; ++i)
                observer_(p.weight.rows_of(of.expert * p.step, rows),
                          p.x.rows_of(pairs.pair[i] / p.share, 1));
            for (int64_t first = 0; first < rows; first += share)
                items.push_back({&p, &of, first, std::min(share, rows - first)});
            if (packed) continue;
            const LinearKernel& kernel = *kernel_of(p, of);
            const size_t stride = stride_of(kernel, of.n);
            each_row(of.n, k, [&](int64_t i, int) {
                const float* const from = p.x.f32(pairs.pair[of.first + i] / p.share);
                std::byte* const to = packed_at(p, of) + i * stride;
                kernel.pack ? kernel.pack(from, k, to) : void(std::memcpy(to, from, k * sizeof(float)));
            });
        }
    }
    run(int64_t(items.size()), [&](int64_t i, int) {
        const auto& [p, of, first, n] = items[i];
        const LinearKernel& kernel = *kernel_of(*p, *of);
        kernel.product(p->weight.row(of->expert * p->step + first), p->weight.stride, n, packed_at(*p, *of),
                       stride_of(kernel, of->n), of->n, k, p->out.f32(of->first) + first,
                       p->out.stride / sizeof(float), access_.weights[number(p->weight.dtype)]);
    });
}

void CpuBackend::experts(Activation kind, const Experts& e, Tensor x, Tensor ids, Tensor shares, Tensor out) {
    const int64_t n = x.rows, taken = ids.cols, pairs = n * taken, inner = e.inner();
    const Tensor up = e.ups();
    const bool same = e.gate.dtype == up.dtype;
    Parts parts;
    const auto packed = [&](const Tensor& w) {
        return parts.take(pairs * max_packed_stride(w.dtype, pairs, w.cols));
    };
    const size_t for_gate = packed(e.gate), for_up = same ? for_gate : packed(up), for_down = packed(e.down);
    const auto floats = [&](int64_t cols) { return parts.take(pairs * cols * sizeof(float)); };
    const size_t gate_at = floats(inner), up_at = floats(inner), out_at = floats(x.cols);
    std::byte* const base = workspace_of(parts.bytes());
    if (dry()) return;
    const auto rows = [&](size_t at, int64_t cols) { return Tensor(base + at, DType::F32, pairs, cols); };
    const Tensor gates = rows(gate_at, inner), ups = rows(up_at, inner), outs = rows(out_at, x.cols);
    const SortedPairs sorted(ids, e.n);
    const SortedProduct first[] = {{e.gate, e.step(), x, taken, gates, base + for_gate},
                                   {up, e.step(), x, taken, ups, base + for_up}};
    const auto add_biases = [&](Tensor to, Tensor biases) {
        if (biases)
            each_row(pairs, to.cols, [&](int64_t i, int) {
                const int32_t pair = sorted.pair[i];
                isa_.add(to.f32(i), biases.f32(ids.i32(pair / taken)[pair % taken]), to.cols);
            });
    };
    multiply_sorted(sorted, first);
    add_biases(gates, e.gate_bias);
    add_biases(ups, e.up_bias);
    gate(kind, gates, ups);
    // From here on rows are in sorted order.
    SortedPairs there = sorted;
    std::iota(there.pair.begin(), there.pair.end(), 0);
    const SortedProduct second[] = {{e.down, x.cols, gates, 1, outs, base + for_down}};
    multiply_sorted(there, second);
    add_biases(outs, e.down_bias);
    each_row(n, x.cols * taken, [&](int64_t i, int) {
        std::fill_n(out.f32(i), x.cols, 0.0f);
        for (int64_t j = 0; j < taken; ++j) {
            const float* const from = outs.f32(sorted.place[i * taken + j]);
            const float share = shares.f32(i)[j] * (e.scale ? e.scale.f32()[ids.i32(i)[j]] : 1.0f);
            for (int64_t c = 0; c < x.cols; ++c) out.f32(i)[c] += share * from[c];
        }
    });
}

void CpuBackend::gate_heads(Tensor x, Tensor by) {
    const int64_t dim = x.cols / by.cols;
    each_row(x.rows, x.cols, [&](int64_t i, int) {
        for (int64_t j = 0; j < x.cols; ++j) x.f32(i)[j] /= 1 + std::exp(-by.f32(i)[j / dim]);
    });
}

}  // namespace slimrt::cpu
