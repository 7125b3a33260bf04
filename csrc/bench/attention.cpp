#include "bench/attention.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <random>
#include <span>

#include "bench/stored_rows.h"

namespace slimrt::bench {
namespace {

/// Random rows; new ones only now and then, since they take long to make.
void fill_rows(Arrays& arrays, int64_t n, std::span<StoredRows> planes, std::minstd_rand& random) {
    constexpr int64_t kRows = 8 * kBlockTokens, kNew = 32;
    std::normal_distribution<float> normal;
    const int width =
        std::ranges::max(planes, {}, [](const StoredRows& p) { return p.rows.width; }).rows.width;
    std::vector<float> values(kRows * width);
    const Tensor rows = arrays.zeros(kRows, width);
    for (int64_t first = 0; first < n; first += rows.rows) {
        if (first % (kNew * rows.rows) == 0) {
            for (float& x : values) x = normal(random);
            arrays->upload(rows, values.data(), rows.bytes());
        }
        for (StoredRows& plane : planes)
            plane.store(arrays.backend(),
                        rows.rows_of(0, std::min(rows.rows, n - first)).cols_of(0, plane.rows.width), first);
    }
}

Tensor random_queries(Arrays& arrays, const Decoding& d, std::minstd_rand& random) {
    std::normal_distribution<float> normal;
    std::vector<float> values(int64_t(d.n_seqs) * d.n_heads * d.query_dim());
    for (float& x : values) x = d.loud * normal(random);
    return arrays.put(values.data(), DType::F32, d.n_seqs, int64_t(d.n_heads) * d.query_dim());
}

std::vector<AttentionSequence> sequences_of(const Decoding& d, const int32_t* table) {
    const int64_t blocks = (d.n + kBlockTokens - 1) / kBlockTokens;
    std::vector<AttentionSequence> sequences;
    for (int i = 0; i < d.n_seqs; ++i)
        sequences.push_back({.query = i,
                             .n_queries = 1,
                             .position = d.n,
                             .end = std::min(d.n, d.n * d.n_seqs - i * blocks * kBlockTokens),
                             .table = table + i * blocks});
    return sequences;
}

/// Seconds of a call, a number for each repetition of `calls` calls.
std::vector<double> time_calls(Arrays& arrays, const AttentionArgs& args, int repetitions, int calls) {
    std::vector<double> seconds;
    float first = 0;
    for (int i = 0; i < repetitions; ++i) {
        const auto start = std::chrono::steady_clock::now();
        for (int call = 0; call < calls; ++call) arrays->attention(args);
        arrays->download(&first, args.values[0].out, sizeof first);  // waits for a device
        const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start;
        seconds.push_back(passed.count() / calls);
    }
    return seconds;
}

}  // namespace

Rope usual_rope(Arrays& arrays, int64_t n, int n_rot) {
    std::vector<float> table;
    for (int64_t position = 0; position < n; ++position)
        for (int i = 0; i < n_rot; i += 2) {
            const float angle = float(position) * std::pow(1e4f, -float(i) / float(n_rot));
            table.insert(table.end(), {std::cos(angle), std::sin(angle)});
        }
    return {arrays.put(table.data(), DType::F32, n, n_rot), n_rot, false};
}

AttentionTimes time_attention(Arrays& arrays, const Decoding& d, int repetitions, int calls) {
    if (d.n < 1 || d.n_seqs < 1 || d.n_kv_heads < 1 || d.n_heads % d.n_kv_heads || calls < 1 || d.rank < 0 ||
        d.rank > (d.absorbed ? d.width() : 0) || (d.wide && !d.absorbed))
        fail(ErrorCode::argument, "nothing to measure");
    const int64_t n = d.n * d.n_seqs;
    std::vector<StoredRows> planes;
    const bool one_scale = d.rank && head_bytes(d.type_k, d.head_dim).scales && !has_groups(d.type_k);
    planes.emplace_back(arrays.backend(), n, d.width(), one_scale ? 1 : d.n_kv_heads, d.type_k);
    if (!d.absorbed) planes.emplace_back(arrays.backend(), n, d.width(), d.n_kv_heads, d.type_v);
    if (d.rank) planes.emplace_back(arrays.backend(), n, d.rank, 1, d.type_v);
    std::minstd_rand random(1);
    fill_rows(arrays, n, planes, random);
    std::vector<AttentionSequence> sequences = sequences_of(d, planes[0].table.data());
    const std::span<AttentionSequence> list = sequences;
    arrays->upload_step({}, {&list, 1});
    const Tensor own = arrays.zeros(d.n_seqs, d.width());
    ScoreTerm score{planes[0].rows, own, d.query_heads(), d.query_dim(), random_queries(arrays, d, random)};
    if (d.absorbed && !d.wide) score.rope = usual_rope(arrays, d.n + 1, d.head_dim);
    std::vector<ValueTerm> values;
    const auto add_values = [&](const StoredRows& plane, int heads, int dim) {
        values.push_back({plane.rows, own.cols_of(0, plane.rows.width), heads, dim,
                          arrays.zeros(d.n_seqs, int64_t(d.n_heads) * dim)});
    };
    add_values(planes[d.absorbed ? 0 : 1], d.absorbed ? 1 : d.n_kv_heads, d.value_dim());
    if (d.rank) add_values(planes[1], 1, d.rank);
    const bool spares = d.absorbed && (d.sparse_threshold > 0 || d.sparse_delta > 0);
    std::optional<MeansOfValues> means;
    if (spares) means.emplace(arrays.backend(), values, sequences);
    if (!d.bias.empty() && int64_t(d.bias.size()) != d.n_heads * (d.n + 1))
        fail(ErrorCode::argument, "these are not the biases of ", d.n_heads, " heads and ", d.n, " rows");
    const Tensor bias = d.bias.empty() ? Tensor{} : arrays.put(d.bias.data(), DType::F32, d.n_heads, d.n + 1);
    AttentionTimes found;
    found.seconds = time_calls(arrays,
                               {.sequences = sequences,
                                .scores = {&score, 1},
                                .values = values,
                                .corrected = d.rank > 0,
                                .n_heads = d.n_heads,
                                .scale = 1 / std::sqrt(float(d.query_dim())),
                                .score_cap = d.score_cap,
                                .relative_bias = bias,
                                .relative_origin = d.n,
                                .sparse_threshold = d.sparse_threshold,
                                .sparse_delta = d.sparse_delta},
                               repetitions, calls);
    for (const StoredRows& plane : planes)
        found.bytes += size_t(n) * (plane.rows.block_stride / kBlockTokens);
    const SparseCounts counts = arrays.sparse_counts();
    found.skipped = counts.rows ? double(counts.skipped) / double(counts.rows) : 0;
    return found;
}

}  // namespace slimrt::bench
