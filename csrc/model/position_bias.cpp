#include "model/position_bias.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace slimrt {
namespace {

/// T5's bucket of a distance row - query (Raffel et al., 2020, section 2.1): half of the buckets have one
/// distance each, the others logarithmic ranges up to relative_distance. Causal: rows after the query share
/// bucket 0; else they have half of all buckets.
int relative_bucket(const ModelConfig& c, int64_t distance, bool causal) {
    int n = c.relative_buckets, first = 0;
    if (causal) {
        distance = std::max<int64_t>(-distance, 0);
    } else {
        n /= 2;
        first = distance > 0 ? n : 0;
        distance = std::abs(distance);
    }
    const int exact = n / 2;
    if (distance < exact) return first + int(distance);
    // In float, as in training: where the logarithm is nearly whole, rounding decides about the bucket.
    const float octaves =
        std::log(float(distance) / float(exact)) / float(std::log(double(c.relative_distance) / exact));
    return first + std::min(exact + int(octaves * float(n - exact)), n - 1);
}

/// ALiBi's slope of a head (Press et al., 2022, for any number of heads): a row at some distance before the
/// query has -slope * distance added to its score.
float alibi_slope(const ModelConfig& c, int head) {
    int whole = 1;  // the largest power of two of heads has even steps, the other heads lie between these
    while (2 * whole <= c.n_heads) whole *= 2;
    const double step = -double(c.alibi_bias) / whole;
    return float(std::exp2(head < whole ? step * (head + 1) : step / 2 * (2 * (head - whole) + 1)));
}

}  // namespace

void fill_relative_bias(Backend& backend, const ModelConfig& c, Tensor values, Tensor bias, int64_t n,
                        bool causal) {
    if (backend.dry()) return;
    std::vector<float> from(values.rows * values.cols), to(bias.cols);
    backend.download(from.data(), values, values.bytes());
    for (int head = 0; head < c.n_heads; ++head) {
        for (int64_t j = 0; j < bias.cols; ++j)
            to[j] = from[relative_bucket(c, j - (n - 1), causal) * c.n_heads + head];
        backend.upload(bias.rows_of(head, 1), to.data(), to.size() * sizeof(float));
    }
}

void fill_alibi(Backend& backend, const ModelConfig& c, Tensor bias) {
    if (backend.dry()) return;  // a plan may ask for any context
    std::vector<float> row(bias.cols);
    for (int head = 0; head < c.n_heads; ++head) {
        const float slope = alibi_slope(c, head);
        for (int64_t j = 0; j < bias.cols; ++j) row[j] = slope * float(j - (bias.cols - 1));
        backend.upload(bias.rows_of(head, 1), row.data(), row.size() * sizeof(float));
    }
}

}  // namespace slimrt
