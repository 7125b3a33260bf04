// The words of CUDA C++ that kernels use: qualifiers, intrinsics, warp collectives.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <type_traits>

#include "cuda_host_threads.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static  // one block after another; kernels of clusters have only shared_memory()
#define __constant__ static
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))

// Arithmetic. min and max: mixed types as the usual conversions have them; of NaN and a number, the number.

template <class A, class B>
    requires(std::is_arithmetic_v<A> && std::is_arithmetic_v<B>)
inline auto min(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>)
        return std::fmin(T(a), T(b));
    else
        return T(a) < T(b) ? T(a) : T(b);
}
template <class A, class B>
    requires(std::is_arithmetic_v<A> && std::is_arithmetic_v<B>)
inline auto max(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>)
        return std::fmax(T(a), T(b));
    else
        return T(a) < T(b) ? T(b) : T(a);
}

inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __saturatef(float x) { return x > 0 ? std::fmin(x, 1.0f) : 0.0f; }
// Compilers fuse no product with a sum here, as they may in device code where these are not used.
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }

inline float __uint_as_float(unsigned u) { return std::bit_cast<float>(u); }
inline float __int_as_float(int i) { return std::bit_cast<float>(i); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline int __float2int_rn(float x) {
    constexpr float end = 0x1p31f;
    using Int = std::numeric_limits<int>;
    return std::isnan(x) ? 0 : x >= end ? Int::max() : x < -end ? Int::min() : int(std::nearbyint(x));
}
inline float __int2float_rn(int x) { return float(x); }

inline int __popc(unsigned x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(unsigned(x)); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(unsigned(x)) + 1; }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t bytes = a | uint64_t(b) << 32;
    unsigned out = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned select = selector >> 4 * i & 15, byte = bytes >> 8 * (select & 7) & 255;
        out |= (select & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
    }
    return out;
}
template <class Byte, class Word>
inline Word cuda_host_dp4a(Word a, Word b, Word c) {
    unsigned sum = unsigned(c);
    for (int i = 0; i < 32; i += 8) sum += unsigned(Byte(a >> i) * Byte(b >> i));
    return Word(sum);
}
inline int __dp4a(int a, int b, int c) { return cuda_host_dp4a<int8_t>(a, b, c); }
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) { return cuda_host_dp4a<uint8_t>(a, b, c); }

// Memory. One thread runs at a time, until it waits.

template <class T>
inline T __ldg(const T* p) {
    return *p;
}
template <class T>
inline size_t __cvta_generic_to_shared(const T* p) {
    return reinterpret_cast<size_t>(p);
}
inline void __threadfence() {}
inline void __threadfence_block() {}

// Atomic accesses order nothing else.

template <class T, class Change>
inline T cuda_host_change(T* p, Change&& change) {
    const std::atomic_ref<T> word(*p);
    T old = word.load(std::memory_order_relaxed);
    while (!word.compare_exchange_weak(old, change(old), std::memory_order_relaxed)) {
    }
    return old;
}
template <class T, class U>
inline T atomicAdd(T* p, U value) {
    return cuda_host_change(p, [&](T old) { return T(old + value); });
}
/// Up to the limit, then 0.
inline unsigned atomicInc(unsigned* p, unsigned limit) {
    return cuda_host_change(p, [&](unsigned old) { return old >= limit ? 0 : old + 1; });
}
template <class T, class U>
inline T atomicMax(T* p, U value) {
    return cuda_host_change(p, [&](T old) { return std::max(old, T(value)); });
}
template <class T, class U>
inline T atomicMin(T* p, U value) {
    return cuda_host_change(p, [&](T old) { return std::min(old, T(value)); });
}
template <class T, class U>
inline T atomicExch(T* p, U value) {
    return cuda_host_change(p, [&](T) { return T(value); });
}
template <class T>
inline T atomicCAS(T* p, T expected, T value) {
    return cuda_host_change(p, [&](T old) { return old == expected ? value : old; });
}

// Threads together.

inline void __syncthreads() { cuda_host::sync_block(); }

namespace cuda_host {

inline int lane() {
    return int((threadIdx.x + blockDim.x * (threadIdx.y + size_t{blockDim.y} * threadIdx.z)) % warpSize);
}

/// Every lane gives a value and the lane whose value it wants.
template <class T>
struct Shuffle final : Collective {
    Shuffle(const char* name, unsigned mask, T value, int source)
        : Collective(name, mask), value(value), source(source) {}
    void run(Collective* const* lanes) override {
        for (int i = 0; i < warpSize; ++i) {
            if (lanes[i] == nullptr) continue;
            Shuffle& to = static_cast<Shuffle&>(*lanes[i]);
            if (lanes[to.source] == nullptr)
                die("%s: lane %d reads lane %d, which is not there", name, i, to.source);
            to.result = static_cast<Shuffle*>(lanes[to.source])->value;
        }
    }
    T value, result{};
    int source;
};
template <class T>
inline T shuffle(const char* name, unsigned mask, T value, int source) {
    static_assert(std::is_arithmetic_v<T>);
    Shuffle<T> call(name, mask, value, source);
    meet(call);
    return call.result;
}

/// The lanes that say yes, as bits; those that take part, too.
struct Vote final : Collective {
    Vote(const char* name, unsigned mask, bool yes) : Collective(name, mask), yes(yes) {}
    void run(Collective* const* lanes) override {
        unsigned all_yes = 0, all_there = 0;
        for (int i = 0; i < warpSize; ++i) {
            if (lanes[i] == nullptr) continue;
            all_there |= 1u << i;
            all_yes |= unsigned(static_cast<Vote*>(lanes[i])->yes) << i;
        }
        for (int i = 0; i < warpSize; ++i) {
            if (lanes[i] == nullptr) continue;
            static_cast<Vote*>(lanes[i])->result = all_yes;
            static_cast<Vote*>(lanes[i])->there = all_there;
        }
    }
    bool yes;
    unsigned result = 0, there = 0;
};
/// Nothing but the order.
struct WarpBarrier final : Collective {
    explicit WarpBarrier(unsigned mask) : Collective("__syncwarp", mask, true) {}
    void run(Collective* const*) override {}
};
inline Vote vote(const char* name, unsigned mask, bool yes) {
    Vote call(name, mask, yes);
    meet(call);
    return call;
}

}  // namespace cuda_host

inline void __syncwarp(unsigned mask = ~0u) {
    cuda_host::WarpBarrier call(mask);
    cuda_host::meet(call);
}
inline unsigned __ballot_sync(unsigned mask, int yes) {
    return cuda_host::vote("__ballot_sync", mask, yes).result;
}
inline int __any_sync(unsigned mask, int yes) { return cuda_host::vote("__any_sync", mask, yes).result != 0; }
inline int __all_sync(unsigned mask, int yes) {
    const cuda_host::Vote vote = cuda_host::vote("__all_sync", mask, yes);
    return vote.result == vote.there;
}

// Lanes beyond a segment of `width` lanes give their own value back.
template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = warpSize) {
    const int start = cuda_host::lane() & ~(width - 1);
    return cuda_host::shuffle("__shfl_sync", mask, value, start + (source & (width - 1)));
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = warpSize) {
    const int own = cuda_host::lane(), source = own ^ bits, end = (own | (width - 1)) + 1;
    return cuda_host::shuffle("__shfl_xor_sync", mask, value, source < end ? source : own);
}
inline int __reduce_max_sync(unsigned mask, int value) {
    for (int bits = 16; bits > 0; bits /= 2) {
        const int other = __shfl_xor_sync(mask, value, bits);
        value = other > value ? other : value;
    }
    return value;
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize) {
    const int own = cuda_host::lane(), source = own + int(delta), end = (own | (width - 1)) + 1;
    return cuda_host::shuffle("__shfl_down_sync", mask, value, source < end ? source : own);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize) {
    const int own = cuda_host::lane(), source = own - int(delta), start = own & ~(width - 1);
    return cuda_host::shuffle("__shfl_up_sync", mask, value, source >= start ? source : own);
}
