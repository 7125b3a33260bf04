// An attention problem in the CPU's memory, and its answer by plain loops in float64.
#pragma once

#include <cmath>
#include <cstring>
#include <deque>
#include <random>
#include <string>
#include <vector>

#include "kernels/backend.h"

namespace slimrt::test {

constexpr int kBlock = 32;
using Floats = std::vector<float>;

struct Case {
    std::string name;
    std::vector<int> stored;   // rows of each sequence
    std::vector<int> queries;  // of each
    int heads = 4, kv = 4, dk = 64, dv = 64;
    DType k = DType::F16, v = DType::F16;
    bool fresh = true, causal = true, whole = false, dense = false;
    int64_t window = 0, hidden = 0;  // hidden: first rows that are not in [begin, end)
    bool relative = false, merge = false, scaled = false, biased = false;
    int n_rot = 0;
    bool interleaved = false;
    float loud = 1, sparse = 0;
    bool one_value = false;  // the whole row of K serves every head
    bool second = false;     // a second score term over whole rows, and a second value term
    float fresh_size = 1;
    float cap = 0;
    bool sinks = false;
    int v_heads = 0;        // 0: kv
    int gap = 0;            // columns of a head of out that are no result
    bool channels = false;  // of K have scales, for the rows of a block
    bool lse = true;
    int processors = 132;  // few: the rows are in one part
    int origin = 0;        // where the positions of the stored rows begin
    float v_size = 1;
};

inline Floats random_floats(size_t n, float size, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    Floats out(n);
    for (float& x : out) x = size * normal(random);
    return out;
}

constexpr unsigned kSeedOfV = 2;

/// A plane of all sequences' rows, and the rows as they read back.
struct Plane {
    std::vector<std::byte> pool;
    Rows rows;
    std::vector<Floats> read;  // of each sequence, stored then fresh
    Floats fresh;
    int width;

    Plane(Backend& backend, const Case& c, const std::vector<std::vector<int32_t>>& tables, int n_blocks,
          int width, int heads, DType type, unsigned seed, bool channels = false)
        : width(width) {
        const int scale_tokens = channels ? kBlock : 0;
        const size_t block = head_bytes(type, width / heads, kBlock, scale_tokens).total() * heads;
        pool.assign(block * n_blocks + 64, std::byte{0xff});  // what no row was written to is NaN
        std::byte* const base = pool.data() + (64 - reinterpret_cast<uintptr_t>(pool.data()) % 64);
        rows = {base, type, width, heads, 0, block, kBlock, 0, scale_tokens};
        if (c.dense) rows = {base, type, width, 1, block / kBlock, 0, 0, 0};
        int n_fresh = 0;
        for (const int n : c.queries) n_fresh += n;
        const float size = seed == kSeedOfV ? c.v_size : 1;
        fresh = random_floats(size_t(n_fresh) * width, size * c.fresh_size, seed);
        int first = 0;
        for (size_t s = 0; s < c.stored.size(); ++s) {
            const int n = c.stored[s], whole = channels ? (n + kBlock - 1) / kBlock * kBlock : n;
            Floats from = random_floats(size_t(whole) * width, size, seed + 100 + unsigned(s));
            std::vector<int32_t> slots;
            for (int i = 0; i < whole; ++i)
                slots.push_back(c.dense ? i : tables[s][i / kBlock] * kBlock + i % kBlock);
            read.emplace_back(size_t(n) * width);
            if (n) {
                const Tensor x(from.data(), DType::F32, whole, width);
                const Slots to = {base,
                                  type,
                                  width,
                                  rows.heads,
                                  rows.row_bytes,
                                  rows.block_stride,
                                  rows.block_tokens,
                                  Tensor(slots.data(), DType::I32, 1, whole),
                                  scale_tokens};
                if (channels)
                    backend.recode({x.data, DType::F32, width, heads, x.stride}, nullptr, 0, whole, to);
                else
                    backend.store(x, to);
                backend.load(rows, tables[s].data(), 0, n, Tensor(read[s].data(), DType::F32, n, width));
            }
            const float* const own = fresh.data() + size_t(first) * width;
            read[s].insert(read[s].end(), own, own + size_t(c.queries[s]) * width);
            first += c.queries[s];
        }
    }
    Tensor fresh_rows() { return Tensor(fresh.data(), DType::F32, int64_t(fresh.size()) / width, width); }
};

struct Problem {
    Case c;
    std::vector<std::vector<int32_t>> tables;
    std::deque<Plane> planes;
    Plane* factor_plane = nullptr;
    std::vector<AttentionSequence> sequences;
    std::vector<ScoreTerm> scores;
    std::vector<ValueTerm> values;
    std::deque<Floats> keep;
    std::vector<Plane*> score_planes, value_planes;
    std::vector<Floats> outs;
    Floats lse, bias_table;
    AttentionArgs args;
    int n = 0;

    Problem(Backend& backend, const Case& c) : c(c) {
        int n_blocks = 0, most = 0;
        for (const int stored : c.stored) {
            tables.emplace_back();
            for (int b = 0; b * kBlock < stored; ++b) tables.back().push_back(n_blocks++);
        }
        for (auto& table : tables)  // not in order
            for (int32_t& b : table) b = n_blocks - 1 - b;
        for (size_t s = 0; s < c.stored.size(); ++s) {
            AttentionSequence q;
            q.query = n, q.n_queries = c.queries[s], q.position = c.causal ? c.stored[s] : 0;
            q.begin = std::min<int64_t>(c.hidden, c.stored[s]), q.end = c.stored[s];
            q.fresh = c.fresh, q.table = c.dense ? nullptr : tables[s].data(), q.causal = c.causal;
            sequences.push_back(q);
            n += c.queries[s];
            most = std::max(most, c.stored[s] + c.queries[s]);
        }
        add_terms(backend, n_blocks, most);
        lse = random_floats(size_t(n) * c.heads, 1, 77);
        for (const ValueTerm& term : values)
            outs.push_back(random_floats(size_t(n) * c.heads * (term.dim + c.gap), 1, 78));
        if (c.relative) bias_table = random_floats(size_t(c.heads) * (2 * most + 1), 1, 79);
        args = {.sequences = sequences,
                .scores = scores,
                .values = values,
                .n_heads = c.heads,
                .scale = 1 / std::sqrt(float(c.dk)),
                .score_cap = c.cap,
                .window = c.window};
        if (c.sinks) args.sinks = vector(random_floats(c.heads, 2, 80));
        if (c.relative) args.relative_bias = Tensor(bias_table.data(), DType::F32, c.heads, 2 * most + 1);
        args.relative_origin = most;
        args.sparse_threshold = c.sparse;
        args.merge = c.merge;
    }

    Tensor vector(Floats v) {
        keep.push_back(std::move(v));
        return Tensor(keep.back().data(), DType::F32, 1, int64_t(keep.back().size()));
    }

    void add_terms(Backend& backend, int n_blocks, int most) {
        const int v_heads = c.v_heads ? c.v_heads : c.kv;
        const auto stored_heads = [&](int n) { return c.whole || c.dense ? 1 : n; };
        Plane& k = planes.emplace_back(backend, c, tables, n_blocks, c.kv * c.dk, stored_heads(c.kv), c.k, 1,
                                       c.channels);
        Plane& v = planes.emplace_back(backend, c, tables, n_blocks, v_heads * c.dv, stored_heads(v_heads),
                                       c.v, kSeedOfV);
        keep.push_back(random_floats(size_t(n) * c.heads * c.dk, c.loud, 3));
        ScoreTerm s{.stored = k.rows,
                    .fresh = k.fresh_rows(),
                    .n_heads = c.kv,
                    .dim = c.dk,
                    .q = Tensor(keep.back().data(), DType::F32, n, c.heads * c.dk)};
        if (c.scaled) {
            s.row_scale = vector(random_floats(c.kv * c.dk, 1, 5));
            factor_plane = &planes.emplace_back(backend, c, tables, n_blocks, 1, 1, DType::F32, 6);
            s.factors = factor_plane->rows;
            s.fresh_factors = factor_plane->fresh_rows();
        }
        if (c.biased) s.bias = vector(random_floats(c.kv * c.dk, 1, 7));
        if (c.n_rot) {
            Floats table;
            for (int p = 0; p < most; ++p)
                for (int i = 0; i < c.n_rot / 2; ++i) {
                    const float angle =
                        float(p + c.origin) * std::pow(50.0f, -2.0f * float(i) / float(c.n_rot));
                    table.push_back(1.1f * std::cos(angle)), table.push_back(1.1f * std::sin(angle));
                }
            keep.push_back(table);
            s.rope = {Tensor(keep.back().data(), DType::F32, most, c.n_rot), c.n_rot, c.interleaved};
        }
        scores.push_back(s);
        score_planes.push_back(&k);
        Plane& of_values = c.one_value ? k : v;
        values.push_back({of_values.rows,
                          of_values.fresh_rows(),
                          c.one_value ? 1 : v_heads,
                          c.one_value ? of_values.width : c.dv,
                          {}});
        value_planes.push_back(&of_values);
        if (!c.second) return;
        keep.push_back(random_floats(size_t(n) * c.heads * v.width, 0.3f, 8));
        scores.push_back({.stored = v.rows,
                          .fresh = v.fresh_rows(),
                          .n_heads = 1,
                          .dim = v.width,
                          .q = Tensor(keep.back().data(), DType::F32, n, c.heads * v.width)});
        score_planes.push_back(&v);
        values.push_back({v.rows, v.fresh_rows(), 1, v.width - 3, {}});
        value_planes.push_back(&v);
    }

    /// Sets what a call writes to copies.
    AttentionArgs with(std::vector<Floats>& to, Floats& to_lse) {
        for (size_t t = 0; t < values.size(); ++t)
            values[t].out = Tensor(to[t].data(), DType::F32, n, c.heads * (values[t].dim + c.gap));
        AttentionArgs a = args;
        if (c.lse) a.lse = Tensor(to_lse.data(), DType::F32, n, c.heads);
        return a;
    }
};

/// A row of a score term as a query of `head` meets it.
inline std::vector<double> key(const Problem& p, size_t t, size_t s, int64_t position, int head) {
    const ScoreTerm& term = p.scores[t];
    const Plane& plane = *p.score_planes[t];
    const int first = head / (p.c.heads / term.n_heads) * term.dim;
    std::vector<double> x(term.dim);
    for (int i = 0; i < term.dim; ++i) {
        x[i] = plane.read[s][position * plane.width + first + i];
        if (term.row_scale)
            x[i] *= double(term.row_scale.f32()[first + i]) * p.factor_plane->read[s][position];
        if (term.bias) x[i] += term.bias.f32()[first + i];
    }
    for (int i = 0; term.rope && i < term.rope.n_rot / 2; ++i) {
        const float* const turn = term.rope.table.f32(position) + 2 * i;
        const int one = term.rope.interleaved ? 2 * i : i;
        const int other = term.rope.interleaved ? one + 1 : i + term.rope.n_rot / 2;
        const double a = x[one], b = x[other];
        x[one] = a * turn[0] - b * turn[1], x[other] = a * turn[1] + b * turn[0];
    }
    return x;
}

inline void reference(const Problem& p, std::vector<Floats>& outs, Floats& lse) {
    for (size_t s = 0; s < p.sequences.size(); ++s) {
        const AttentionSequence& q = p.sequences[s];
        for (int i = 0; i < q.n_queries; ++i) {
            for (int head = 0; head < p.c.heads; ++head) {
                const int64_t at = q.position + i, row = q.query + i;
                const int64_t rows = q.end + (q.fresh ? q.n_queries : 0);
                std::vector<double> weights(rows, 0.0);
                double high = -INFINITY, sum = 0;
                std::vector<bool> sees(rows, false);
                for (int64_t r = 0; r < rows; ++r) {
                    sees[r] = (r >= q.end || r >= q.begin) && (!q.causal || r <= at) &&
                              (p.c.window == 0 || r > at - p.c.window) && (q.causal || r < q.end);
                    if (!sees[r]) continue;
                    double dot = 0;
                    for (size_t t = 0; t < p.scores.size(); ++t) {
                        const ScoreTerm& term = p.scores[t];
                        const std::vector<double> x = key(p, t, s, r, head);
                        const float* const query = term.q.f32(row) + term.q.cols / p.c.heads * head;
                        for (int d = 0; d < term.dim; ++d) dot += x[d] * query[d];
                    }
                    weights[r] = dot * p.args.scale;
                    if (p.c.cap > 0) weights[r] = p.c.cap * std::tanh(weights[r] / p.c.cap);
                    if (p.c.relative)
                        weights[r] += p.args.relative_bias.f32(head)[p.args.relative_origin + r - at];
                    high = std::max(high, weights[r]);
                }
                const double before = p.args.merge ? lse[row * p.c.heads + head] : -INFINITY;
                const double sink = p.c.sinks ? p.args.sinks.f32()[head] : -INFINITY;
                high = std::max({high, before, sink});
                for (int64_t r = 0; r < rows; ++r)
                    sum += weights[r] = sees[r] ? std::exp(weights[r] - high) : 0;
                const double keep = std::exp(before - high);
                sum = high == -INFINITY ? 0 : sum + keep + std::exp(sink - high);
                for (size_t t = 0; t < p.values.size(); ++t) {
                    const ValueTerm& term = p.values[t];
                    const Plane& plane = *p.value_planes[t];
                    const int first = head / (p.c.heads / term.n_heads) * term.dim;
                    for (int d = 0; d < term.dim; ++d) {
                        float& out = outs[t][(row * p.c.heads + head) * (term.dim + p.c.gap) + d];
                        double x = p.args.merge ? keep * out : 0;
                        for (int64_t r = 0; r < rows; ++r)
                            if (sees[r]) x += weights[r] * plane.read[s][r * plane.width + first + d];
                        out = float(sum == 0 ? 0 : x / sum);
                    }
                }
                lse[row * p.c.heads + head] = float(high + std::log(sum));
            }
        }
    }
}

}  // namespace slimrt::test
