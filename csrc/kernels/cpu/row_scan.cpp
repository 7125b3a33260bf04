#include "kernels/cpu/row_scan.h"

#include <algorithm>
#include <cmath>

#include "kernels/cpu/simd.h"

namespace slimrt::cpu {
namespace SLIMRT_ISA {
namespace {

typedef double Doubles __attribute__((vector_size(32)));

constexpr int64_t at_once = 4 * lanes;
static_assert(lanes == 4 && scan_block % at_once == 0);

float block_maximum(const float* x) {
    Vec largest[4] = {load(x), load(x + 4), load(x + 8), load(x + 12)};
    Ints numbers[4] = {};
    for (int j = 0; j < 4; ++j) numbers[j] = largest[j].v == largest[j].v;
    for (int64_t i = at_once; i < scan_block; i += at_once)
        for (int j = 0; j < 4; ++j) {
            const Vec a = load(x + i + j * lanes);
            numbers[j] &= a.v == a.v;
            largest[j] = max(a, largest[j]);
        }
    const Ints all = (numbers[0] & numbers[1]) & (numbers[2] & numbers[3]);
    if (!(all[0] & all[1] & all[2] & all[3])) return NAN;
    return max_of(max(max(largest[0], largest[1]), max(largest[2], largest[3])));
}

/// e^x for x <= 0; 0 below -87, so that no result is subnormal: whether a thread flushes those to zero is a
/// setting of its own.
Vec exp_to_one(Vec x) {
    const Ints kept = x.v >= splat(-87).v;
    const auto [n, r, p] = exp_parts(max(x, splat(-87)));
    const Bits power = (reinterpret_cast<Bits>(__builtin_convertvector(n.v, Ints)) + 127) << 23;
    const Vec e = fma(p, r * r, r + splat(1)) * Vec{as_floats(power)};
    return {as_floats(as_bits(e.v) & reinterpret_cast<Bits>(kept))};
}

template <bool divide>
double exp_block(const float* x, float top, float temperature, float* p) {
    Doubles sums[4] = {};
    for (int64_t i = 0; i < scan_block; i += at_once)
        for (int j = 0; j < 4; ++j) {
            const Vec shifted = load(x + i + j * lanes) - splat(top);
            const Vec e = exp_to_one(divide ? shifted / splat(temperature) : shifted);
            store(p + i + j * lanes, e);
            sums[j] += __builtin_convertvector(e.v, Doubles);
        }
    const Doubles all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    return (all[0] + all[2]) + (all[1] + all[3]);
}

}  // namespace
}  // namespace SLIMRT_ISA

namespace {

/// f(block, elements, count) for each block; the last one is padded with -infinity.
template <class F>
void each_block(const float* x, int64_t n, F f) {
    const int64_t whole = n / scan_block, rest = n % scan_block;
    for (int64_t b = 0; b < whole; ++b) f(b, x + b * scan_block, scan_block);
    if (rest == 0) return;
    float padded[scan_block];
    std::fill(std::copy_n(x + whole * scan_block, rest, padded), padded + scan_block, -INFINITY);
    f(whole, padded, rest);
}

}  // namespace

void scan_maxima(const float* x, int64_t n, float* maxima) {
    each_block(x, n,
               [&](int64_t b, const float* block, int64_t) { maxima[b] = SLIMRT_ISA::block_maximum(block); });
}

void scan_exp(const float* x, int64_t n, float top, float temperature, float* p, double* sums) {
    float here[scan_block];
    each_block(x, n, [&](int64_t b, const float* block, int64_t size) {
        sums[b] = temperature == 1 ? SLIMRT_ISA::exp_block<false>(block, top, temperature, here)
                                   : SLIMRT_ISA::exp_block<true>(block, top, temperature, here);
        if (p) std::copy_n(here, size, p + b * scan_block);
    });
}

}  // namespace slimrt::cpu
