// Rotary frequencies and their scalings.
#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/error.h"
#include "model/architecture.h"
#include "model/config.h"

namespace slimrt {
namespace {

/// Frequency of pair i before any per-pair factor, in radians a position.
double frequency(const RopeConfig& r, int i) { return std::pow(r.base, -2.0 * i / r.n_rot); }

/// YaRN (Peng et al. 2023, section 3.2): low frequencies are interpolated, high ones kept, a ramp between.
double yarn_frequency(const RopeConfig& r, bool whole_ramp, int i) {
    auto pair_of = [&](double rotations) {  // index of the pair with so many rotations over n_ctx_orig
        return r.n_rot * std::log(r.n_ctx_orig / (rotations * 2 * std::numbers::pi)) / (2 * std::log(r.base));
    };
    const double first = pair_of(r.beta_fast), last = pair_of(r.beta_slow);
    const double low = std::max(whole_ramp ? std::floor(first) : first, 0.0);
    const double high = std::min(whole_ramp ? std::ceil(last) : last, r.n_rot - 1.0);
    const double interpolated = std::clamp((i - low) / std::max(high - low, 1e-3), 0.0, 1.0);
    return frequency(r, i) * (interpolated / r.factor + 1 - interpolated);
}

/// Divisors of the pairs' frequencies, from a tensor (llama3, longrope); empty without one.
std::vector<float> pair_factors(const RopeConfig& r, const GgufFile& file, int64_t n_ctx) {
    if (!r.pair_factors) return {};
    const bool is_long = n_ctx > r.n_ctx_orig;
    const char* name = r.scaling != RopeScaling::longrope ? "rope_freqs.weight"
                       : is_long                          ? "rope_factors_long.weight"
                                                          : "rope_factors_short.weight";
    const auto it = file.tensors().find(name);
    if (it == file.tensors().end()) {
        if (r.scaling == RopeScaling::longrope)
            fail(ErrorCode::format, file.path(), ": tensor '", name, "' is missing");
        return {};
    }
    const Tensor& t = it->second;
    if (t.dtype != DType::F32 || t.rows * t.cols != r.n_rot / 2)
        fail(ErrorCode::format, file.path(), ": tensor '", name, "' must hold ", r.n_rot / 2, " f32 values");
    return {t.f32(), t.f32() + r.n_rot / 2};
}

/// The factor of cos and sin: attn_factor, in YaRN times 1 + 0.1 ln(factor) as in llama.cpp. longrope without
/// attn_factor: sqrt(1 + ln s / ln n_ctx_orig), s = n_ctx_train / n_ctx_orig (Phi-3), or the family's own.
double magnitude(const RopeConfig& r, int64_t n_ctx_train, double own_longrope) {
    const double said = r.attn_factor ? r.attn_factor : 1;
    if (r.scaling == RopeScaling::yarn) return said * (1 + 0.1 * std::log(std::max(r.factor, 1.0)));
    if (r.scaling != RopeScaling::longrope) return said;
    const double stretch = double(n_ctx_train) / r.n_ctx_orig;
    const double usual = stretch > 1 ? std::sqrt(1 + std::log(stretch) / std::log(double(r.n_ctx_orig))) : 1;
    if (r.attn_factor && (!own_longrope || std::abs(said - usual) > 1e-4)) return said;
    return own_longrope ? own_longrope : usual;
}

}  // namespace

RopeFrequencies rope_frequencies(const ModelConfig& c, const RopeConfig& r, const GgufFile& file,
                                 int64_t n_ctx) {
    const std::vector<float> factors = pair_factors(r, file, n_ctx);
    RopeFrequencies out;
    out.magnitude = magnitude(r, c.n_ctx_train, c.architecture->own_longrope);
    for (int i = 0; i < r.n_rot / 2; ++i) {
        double f = r.scaling == RopeScaling::yarn ? yarn_frequency(r, c.architecture->whole_ramp, i)
                                                  : frequency(r, i);
        if (r.scaling == RopeScaling::linear) f /= r.factor;
        out.pairs.push_back(factors.empty() ? f : f / factors[i]);
        if (!std::isfinite(out.pairs.back()) || !std::isfinite(float(out.magnitude)))
            fail(ErrorCode::format, file.path(),
                 ": base, factors and scaling of the rotary embedding give pair ", i,
                 " no finite angle: the file is damaged; convert the model again");
    }
    return out;
}

std::vector<float> RopeFrequencies::table(int64_t first, int64_t n) const {
    std::vector<float> out;
    out.reserve(n * 2 * (unrotated + pairs.size()));
    for (int64_t p = first; p < first + n; ++p) {
        const double grown = 1 + temperature_scale * std::log1p(double(p / temperature_length));
        for (int i = 0; i < unrotated; ++i) {
            out.push_back(float(grown));
            out.push_back(0);
        }
        for (const double frequency : pairs) {
            out.push_back(float(std::cos(p * frequency) * magnitude * grown));
            out.push_back(float(std::sin(p * frequency) * magnitude * grown));
        }
    }
    return out;
}

}  // namespace slimrt
