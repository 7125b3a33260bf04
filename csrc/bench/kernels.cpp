#include "bench/kernels.h"

#include <algorithm>
#include <cstdlib>

#include "bench/layer.h"
#include "bench/timing.h"
#include "bench/tune.h"
#include "bench/weights.h"
#include "engine/devices.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/interleave.h"

namespace slimrt::bench {
namespace {

double median(std::vector<double> of) {
    const auto middle = of.begin() + std::ptrdiff_t(of.size() / 2);
    std::ranges::nth_element(of, middle);
    return *middle;
}

constexpr DType kTypes[] = {DType::Q8_0,  DType::Q4_0,   DType::Q4_K,   DType::Q5_K,
                            DType::Q6_K,  DType::IQ4_NL, DType::IQ4_XS, DType::MXFP4,
                            DType::TQ2_0, DType::F16,    DType::BF16,   DType::F32};

/// Whole matrices.
std::vector<uint8_t> random_matrices(DType type, const Effort& effort) {
    const size_t matrix = size_t(effort.rows) * row_bytes(type, effort.cols);
    return random_weights(std::max<size_t>(1, (size_t(effort.megabytes) << 20) / matrix) * matrix);
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
    const Levels usual = mode.default_levels();
    return {to_text(usual, usual), "q4", "q2"};
}

}  // namespace

std::vector<Json> bandwidth(const Effort& effort) {
    std::vector<Json> found;
    for (const int threads : effort.threads)
        found.push_back(Json{{"threads", threads}, {"gb_s", read_bandwidth(threads, effort.megabytes)}});
    return found;
}

std::vector<Json> access(const Effort& effort) {
    std::vector<Json> found;
    if (const char* const said = std::getenv("SLIMRT_ACCESS"); said && *said)
        return {Json{{"fixed", to_text(cpu::parse_access(said))}}};
    cpu::AccessPolicy policy = cpu::usual_access();
    for (const std::string& kind : cpu::access_kinds(effort.isa))
        for (const int threads : effort.threads) {
            const Tuned one = tune(kind, effort.isa, threads, effort.seconds);
            found.push_back(Json{{"kind", kind},
                                 {"threads", threads},
                                 {"best", to_text(one.best)},
                                 {"gain", one.gain},
                                 {"read_share", one.read_share}});
            *policy.find(kind) = one.best;
        }
    cpu::set_access(policy);
    return found;
}

std::vector<Json> products(const Effort& effort) {
    std::vector<Json> found;
    for (const DType stored : kTypes) {
        const DType interleaved = cpu::interleaved_type(stored);  // as models are held: rows are sixteens
        const DType type = cpu::multiplies(cpu::choose_isa(effort.isa), interleaved) ? interleaved : stored;
        const std::vector<uint8_t> bytes = random_matrices(type, effort);
        const double peak = dot_peak(type, effort.isa);
        for (const int threads : effort.threads)
            for (const int64_t tokens : {1, 8, 64})
                found.push_back(
                    product(effort, {bytes, type, effort.rows, effort.cols}, threads, tokens, peak));
    }
    return found;
}

std::vector<Json> attention(const Effort& effort) {
    std::vector<Json> found;
    for (const CacheMode* mode : cache_modes(false)) {
        if (mode->for_latent_attention()) continue;  // of other layers
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
    }
    return found;
}

}  // namespace slimrt::bench
