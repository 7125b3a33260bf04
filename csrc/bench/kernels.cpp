#include "bench/kernels.h"

#include <algorithm>
#include <cstring>
#include <random>

#include "bench/layer.h"
#include "bench/timing.h"
#include "engine/devices.h"
#include "kernels/cpu/cpu_backend.h"

namespace slimrt::bench {
namespace {

double median(std::vector<double> of) {
    const auto middle = of.begin() + std::ptrdiff_t(of.size() / 2);
    std::ranges::nth_element(of, middle);
    return *middle;
}

/// A type of weight, and where a block of it keeps its f16 numbers; the rest may be any bits.
struct WeightType {
    DType type;
    std::vector<int> halves;
};
const WeightType kTypes[] = {{DType::Q8_0, {0}},    {DType::Q4_0, {0}},   {DType::Q4_K, {0, 2}},
                             {DType::Q5_K, {0, 2}}, {DType::Q6_K, {208}}, {DType::F16, {0}},
                             {DType::BF16, {}},     {DType::F32, {}}};

/// Whole matrices of random blocks: their numbers are finite and small.
std::vector<uint8_t> random_weights(const WeightType& of, const Effort& effort) {
    const DTypeInfo& info = dtype_info(of.type);
    const size_t matrix = size_t(effort.rows) * row_bytes(of.type, effort.cols);
    std::vector<uint8_t> bytes(std::max<size_t>(1, (size_t(effort.megabytes) << 20) / matrix) * matrix);
    constexpr uint16_t kHalf = 0x211e;  // 0.01
    constexpr float kFloat = 0.01f;
    std::minstd_rand random(1);
    for (size_t at = 0; at < bytes.size(); at += size_t(info.block_bytes)) {
        uint8_t* const block = bytes.data() + at;
        for (int i = 0; i < info.block_bytes; ++i) block[i] = uint8_t(random() >> 8);
        for (const int half : of.halves) std::memcpy(block + half, &kHalf, sizeof kHalf);
        if (of.type == DType::F32) std::memcpy(block, &kFloat, sizeof kFloat);
        if (of.type == DType::BF16) block[1] = 0x3c;
    }
    return bytes;
}

Json product(const Effort& effort, const Matrices& weights, int threads, int64_t tokens, double peak) {
    Arrays arrays(open_backend(effort.isa.empty() ? "cpu" : effort.isa, threads));
    Matrices some = weights;
    if (tokens > 16) some.bytes = some.bytes.first(weights.of_one());  // bound by arithmetic: one tells
    const double passes = double(some.count());
    const double seconds = median(time_linear(arrays, some, tokens, threads, effort.turns)) / passes;
    const double read = median(time_linear(arrays, weights, 0, threads, 3)) / double(weights.count());
    const double macs = double(weights.rows * weights.cols * tokens);
    return {{"type", dtype_info(weights.type).name},
            {"threads", threads},
            {"tokens", tokens},
            {"microseconds", seconds * 1e6},
            {"gb_s", double(weights.of_one()) / seconds / 1e9},
            {"read_gb_s", double(weights.of_one()) / read / 1e9},
            {"gmac_s", macs / seconds / 1e9},
            {"peak_gmac_s_of_a_thread", peak}};
}

/// What rows are measured in: types, or, where rows age, what old ones become.
std::vector<std::string> row_types(const CacheMode& mode) {
    if (!mode.has_levels()) return {"f32", "f16", "bf16", "q8", "fp8_e4m3", "q4"};
    const Levels usual = mode.usual_levels();
    return {to_text(usual, usual), "q4", "q2"};
}

}  // namespace

std::vector<Json> bandwidth(const Effort& effort) {
    std::vector<Json> found;
    for (const int threads : effort.threads)
        found.push_back(Json{{"threads", threads}, {"gb_s", read_bandwidth(threads, effort.megabytes)}});
    return found;
}

std::vector<Json> products(const Effort& effort) {
    std::vector<Json> found;
    for (const WeightType& of : kTypes) {
        const std::vector<uint8_t> bytes = random_weights(of, effort);
        const double peak = dot_peak(of.type, effort.isa);
        for (const int threads : effort.threads)
            for (const int64_t tokens : {1, 8, 64})
                found.push_back(
                    product(effort, {bytes, of.type, effort.rows, effort.cols}, threads, tokens, peak));
    }
    return found;
}

std::vector<Json> attention(const Effort& effort) {
    std::vector<Json> found;
    for (const CacheMode* mode : cache_modes(false))
        for (const std::string& type : row_types(*mode))
            for (const int threads : effort.threads) {
                Arrays arrays(open_backend(effort.isa.empty() ? "cpu" : effort.isa, threads));
                const AttnConfig layer = layer_for(*mode, type);
                const LayerTimes times = time_layer(arrays, *mode, layer, effort.cached, effort.turns);
                const double seconds = median(times.seconds);
                found.push_back(Json{{"mode", mode->name()},
                                     {"type", type},
                                     {"threads", threads},
                                     {"rows", effort.cached},
                                     {"heads", layer.n_heads},
                                     {"head_dim", layer.head_dim},
                                     {"rotated", layer.n_rot},
                                     {"rank", layer.rank},
                                     {"cache_bytes", times.bytes},
                                     {"microseconds", seconds * 1e6},
                                     {"gb_s", double(times.bytes) / seconds / 1e9}});
            }
    return found;
}

}  // namespace slimrt::bench
