#include "engine/input_squares.h"

#include <algorithm>
#include <iterator>

namespace slimrt {

InputSquaresOfWeights::InputSquaresOfWeights(const GgufFile& file,
                                             const std::map<std::string, Tensor>& held) {
    for (const GgufTensorInfo& info : file.tensor_list()) {
        const auto it = held.find(info.name);
        if (it == held.end() || info.sizes.size() < 2) continue;
        by_address_[it->second.data] = {info.name, it->second, it->second.rows / int64_t(info.sizes[1])};
    }
}

void InputSquaresOfWeights::add(Tensor weight, Tensor x) {
    const auto next = by_address_.upper_bound(weight.data);
    if (next == by_address_.begin()) return;
    const auto& [name, all, matrices] = std::prev(next)->second;
    const int64_t row = (weight.data - all.data) / int64_t(all.stride), each = all.rows / matrices;
    if (row >= all.rows || row % each || weight.cols != all.cols) return;
    InputSquares& of = sums_[name];
    of.sums.resize(matrices * all.cols);
    of.counts.resize(matrices);
    const int64_t first = row / each, end = first + std::max<int64_t>(weight.rows / each, 1);
    for (int64_t matrix = first; matrix < end; ++matrix) {
        double* const sums = of.sums.data() + matrix * all.cols;
        for (int64_t i = 0; i < x.rows; ++i)
            for (int64_t j = 0; j < x.cols; ++j) sums[j] += double(x.f32(i)[j]) * x.f32(i)[j];
        of.counts[matrix] += x.rows;
    }
}

}  // namespace slimrt
