// Norms, RoPE, activations and sums of rows. Compiled once per ISA.
#include "kernels/cpu/rows.h"
#include "kernels/cpu/simd.h"

namespace slimrt::cpu::SLIMRT_ISA {
namespace {

/// fn(i, load, store) for every vector of n elements: load(p) and store(p, v) take whole vectors, and at the
/// end the remainder.
template <class Fn>
inline void each_vector(int64_t n, const Fn& fn) {
    int64_t i = 0;
    const auto load_all = [](const float* p) { return load(p); };
    const auto store_all = [](float* p, Vec v) { store(p, v); };
    for (; i + lanes <= n; i += lanes) fn(i, load_all, store_all);
    const int64_t left = n - i;
    if (left == 0) return;
    const auto load_left = [left](const float* p) { return load_part(p, left); };
    const auto store_left = [left](float* p, Vec v) { store_part(p, v, left); };
    fn(i, load_left, store_left);
}

/// The sum of fn(x) over n elements, in four vector accumulators.
template <class Fn>
inline float total(const float* x, int64_t n, const Fn& fn) {
    Vec part[4] = {splat(0), splat(0), splat(0), splat(0)};
    int64_t i = 0;
    for (; i + 4 * lanes <= n; i += 4 * lanes) {
        for (int j = 0; j < 4; ++j) part[j] = part[j] + fn(load(x + i + j * lanes));
    }
    for (; i + lanes <= n; i += lanes) part[0] = part[0] + fn(load(x + i));
    float rest = 0;
    if (i < n) {  // fn(0) of the padding must not count
        float last[lanes];
        store(last, fn(load_part(x + i, n - i)));
        for (int64_t j = 0; j < n - i; ++j) rest += last[j];
    }
    return sum((part[0] + part[1]) + (part[2] + part[3])) + rest;
}

float square_root(float x) {
    return __builtin_sqrtf(x);  // an instruction, given -fno-math-errno
}

template <class Fn>
void map(float* x, int64_t n, const Fn& fn) {
    each_vector(n, [&](int64_t i, auto load, auto store) { store(x + i, fn(load(x + i))); });
}

Vec sigmoid_times(Vec x, Vec argument) { return x / (splat(1) + exp(splat(0) - argument)); }

Vec silu(Vec x) { return sigmoid_times(x, x); }

/// x/2 (1 + tanh u) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3)
Vec gelu_tanh(Vec x) { return sigmoid_times(x, splat(1.5957691216f) * fma(splat(0.044715f) * x * x, x, x)); }

Vec relu(Vec x) { return max(splat(0), x); }

/// x (1 + erf(x / sqrt 2)) / 2 = max(x, 0) - |x| erfc(|x| / sqrt 2) / 2, which loses nothing where x < 0.
Vec gelu_erf(Vec x) {
    const Vec size = min(splat(20), max(splat(0) - x, x));  // beyond it erfc is 0
    return relu(x) - splat(0.5f) * size * erfc(splat(0.70710678f) * size);
}

Vec clamped_swish(Vec x) {
    const Vec most = min(splat(7), x);
    return sigmoid_times(most, splat(1.702f) * most);
}

/// fn(activation, up): the activation with this number (backend.h), inlined where fn uses it, and the
/// function applied to the factor it gates.
template <class Fn>
void with_activation(uint32_t kind, const Fn& fn) {
    const auto as_it_is = [](Vec up) { return up; };
    switch (kind) {
        case 0:
            return fn([](Vec x) { return silu(x); }, as_it_is);
        case 1:
            return fn([](Vec x) { return gelu_tanh(x); }, as_it_is);
        case 2:
            return fn([](Vec x) { return gelu_erf(x); }, as_it_is);
        case 3:
            return fn([](Vec x) { return relu(x); }, as_it_is);
        case 4:
            return fn([](Vec x) { return tanh(x); }, as_it_is);
        case 5:
            return fn([](Vec x) { return relu(x) * relu(x); }, as_it_is);
        default:
            return fn([](Vec x) { return clamped_swish(x); },
                      [](Vec up) { return min(splat(7), max(splat(-7), up)) + splat(1); });
    }
}

void rope_interleaved(float* x, const float* cs, int64_t n_rot) {
    int64_t i = 0;
    const Vec sign = [] {
        float alternating[lanes];
        for (int j = 0; j < lanes; ++j) alternating[j] = j % 2 ? 1.0f : -1.0f;
        return load(alternating);
    }();
    for (; i + lanes <= n_rot; i += lanes) {
        const Vec pairs = load(x + i), c = load(cs + i);
        store(x + i, fma(swap_pairs(pairs) * sign, duplicate_odd(c), pairs * duplicate_even(c)));
    }
    for (; i < n_rot; i += 2) {
        const float a = x[i], b = x[i + 1];
        x[i] = a * cs[i] - b * cs[i + 1];
        x[i + 1] = b * cs[i] + a * cs[i + 1];
    }
}

void rope_neox(float* x, const float* cs, int64_t n_rot) {
    const int64_t half = n_rot / 2;
    int64_t i = 0;
    for (; i + lanes <= half; i += lanes) {
        Vec cosine, sine;
        deinterleave(load(cs + 2 * i), load(cs + 2 * i + lanes), &cosine, &sine);
        const Vec a = load(x + i), b = load(x + half + i);
        store(x + i, a * cosine - b * sine);
        store(x + half + i, b * cosine + a * sine);
    }
    for (; i < half; ++i) {
        const float a = x[i], b = x[half + i];
        x[i] = a * cs[2 * i] - b * cs[2 * i + 1];
        x[half + i] = b * cs[2 * i] + a * cs[2 * i + 1];
    }
}

}  // namespace

float read(const float* from, int64_t n, Access access) {
    constexpr int kVectors = 4;
    Vec top[kVectors] = {splat(0), splat(0), splat(0), splat(0)};
    for (int64_t i = 0; i + kVectors * lanes <= n; i += kVectors * lanes) {
        prefetch(from + i + access.ahead / 4, kVectors * lanes * 4, access.hint);
        for (int j = 0; j < kVectors; ++j) top[j] = max(load(from + i + j * lanes), top[j]);
    }
    return max_of(max(max(top[0], top[1]), max(top[2], top[3])));
}

float inverse_rms(const float* x, float eps, int64_t n) {
    const float mean_square = total(x, n, [](Vec v) { return v * v; }) / static_cast<float>(n);
    return 1 / square_root(mean_square + eps);
}

void rms_norm(const float* x, const float* weight, float eps, int64_t n, float* out) {
    const Vec scale = splat(inverse_rms(x, eps, n));
    each_vector(n, [&](int64_t i, auto load, auto store) {
        const Vec y = load(x + i) * scale;
        store(out + i, weight ? y * load(weight + i) : y);
    });
}

void layer_norm(const float* x, const float* weight, const float* bias, float eps, int64_t n, float* out) {
    const Vec mean = splat(total(x, n, [](Vec v) { return v; }) / static_cast<float>(n));
    const float variance =
        total(x, n, [mean](Vec v) { return (v - mean) * (v - mean); }) / static_cast<float>(n);
    const Vec scale = splat(1 / square_root(variance + eps));
    each_vector(n, [&](int64_t i, auto load, auto store) {
        Vec y = (load(x + i) - mean) * scale;
        if (weight) y = y * load(weight + i);
        if (bias) y = y + load(bias + i);
        store(out + i, y);
    });
}

void rope(float* x, const float* cs, int64_t n_rot, bool interleaved) {
    interleaved ? rope_interleaved(x, cs, n_rot) : rope_neox(x, cs, n_rot);
}

void activate(uint32_t kind, float* x, int64_t n) {
    with_activation(kind, [=](auto activation, auto) { map(x, n, activation); });
}

void gate(uint32_t kind, float* gate, const float* up, int64_t n) {
    with_activation(kind, [=](auto activation, auto factor) {
        each_vector(n, [&](int64_t i, auto load, auto store) {
            store(gate + i, activation(load(gate + i)) * factor(load(up + i)));
        });
    });
}

void add(float* x, const float* y, int64_t n) {
    each_vector(n, [&](int64_t i, auto load, auto store) { store(x + i, load(x + i) + load(y + i)); });
}

void multiply(float* x, const float* y, float factor, int64_t n) {
    const Vec all = splat(factor);
    each_vector(n,
                [&](int64_t i, auto load, auto store) { store(x + i, load(x + i) * (load(y + i) * all)); });
}

}  // namespace slimrt::cpu::SLIMRT_ISA
