#include "engine/ranking.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/row_scan.h"

namespace slimrt {

double log_normaliser(std::span<const float> row) {
    static const cpu::Isa& isa = cpu::choose_isa("");
    constexpr size_t kBlock = 1024;  // stays in L1, where the softmax replaces it
    alignas(64) float block[kBlock];
    float top = -INFINITY, sum = 0;
    for (size_t i = 0; i < row.size(); i += kBlock) {
        const auto some = row.subspan(i, std::min(kBlock, row.size() - i));
        std::ranges::copy(some, block);
        isa.softmax(block, int64_t(some.size()), &top, &sum);
    }
    return double(top) + std::log(double(sum));
}

std::vector<int32_t> largest(std::span<const float> row, size_t count) {
    constexpr size_t kBlock = cpu::scan_block;
    std::vector<float> maxima(size_t(cpu::scan_blocks(int64_t(row.size()))));
    cpu::scan_maxima(row.data(), int64_t(row.size()), maxima.data());
    std::ranges::replace_if(maxima, [](float x) { return std::isnan(x); }, -INFINITY);
    float bound = -INFINITY;  // at least `count` logits reach the count-th largest maximum
    if (count > 0 && count <= maxima.size()) {
        std::vector<float> order = maxima;
        std::ranges::nth_element(order, order.begin() + int64_t(count - 1), std::greater<>());
        bound = order[count - 1];
    }
    std::vector<int32_t> ids;
    for (size_t b = 0; b < maxima.size(); ++b) {
        if (maxima[b] < bound || maxima[b] == -INFINITY) continue;
        const size_t first = b * kBlock, end = std::min(first + kBlock, row.size());
        for (size_t i = first; i < end; ++i)
            if (row[i] >= bound && row[i] > -INFINITY) ids.push_back(int32_t(i));
    }
    const auto likelier = [&](int32_t a, int32_t b) {
        return row[a] > row[b] || (row[a] == row[b] && a < b);
    };
    const size_t n = std::min(count, ids.size());
    std::partial_sort(ids.begin(), ids.begin() + int64_t(n), ids.end(), likelier);
    ids.resize(n);
    return ids;
}

}  // namespace slimrt
