// The twin of csrc/kernels/cuda/ptx.cuh for the host.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "cuda_host_races.h"

namespace slimrt::cuda {

inline void wait_for_previous() { cuda_host::wait_for_previous(); }
inline void let_next_begin() {}
inline void begin_early() { wait_for_previous(); }

inline unsigned char* shared_memory() { return cuda_host::shared_memory(); }
inline unsigned char* shared_memory_behind_static() { return cuda_host::shared_memory(); }

inline void copy16(void* shared, const void* global, bool wanted = true) {
    cuda_host::copy_later(shared, wanted ? global : nullptr);
}
inline void copy_part_of_16(void* shared, const void* global, int bytes) {
    cuda_host::copy_later(shared, global, size_t(bytes));
}
inline void commit_copies() { cuda_host::end_copy_group(); }
template <int n>
inline void wait_copies() {
    cuda_host::finish_copies(n);
}

inline void barrier_init(uint64_t* barrier, uint32_t arrivals) { cuda_host::barrier_init(barrier, arrivals); }
inline void barrier_arrive(uint64_t* barrier) { cuda_host::barrier_arrive(barrier); }
inline void barrier_arrive_after_copies(uint64_t* barrier) { cuda_host::arrive_after_copies(barrier); }
inline void barrier_wait(uint64_t* barrier, uint32_t parity) { cuda_host::barrier_wait(barrier, parity); }

inline void count_up(uint32_t* count) {
    std::atomic_ref<uint32_t>(*count).fetch_add(1, std::memory_order_release);
}
inline void count_wait(const uint32_t* count, uint32_t wanted) {
    cuda_host::wait_for_count(count, wanted);
    std::atomic_ref<uint32_t>(*const_cast<uint32_t*>(count)).load(std::memory_order_acquire);
}

inline void send_word(uint64_t* to, uint32_t data, uint32_t tag) {
    std::atomic_ref<uint64_t>(*to).store(uint64_t{tag} << 32 | data, std::memory_order_relaxed);
}
/// Waits for the tag: who looks again and again lets nobody else run here.
inline uint64_t look_at_word(const uint64_t* from, uint32_t tag) {
    cuda_host::wait_for_count(reinterpret_cast<const uint32_t*>(from) + 1, tag);
    return std::atomic_ref<uint64_t>(*const_cast<uint64_t*>(from)).load(std::memory_order_relaxed);
}

namespace host {

constexpr unsigned kAllLanes = ~0u;

inline float from_bf16(uint16_t bits) { return __uint_as_float(uint32_t{bits} << 16); }
inline float from_f16(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }

struct LoadMatrices final : cuda_host::Collective {
    LoadMatrices(uint32_t* r, const void* row, bool transposed)
        : Collective("load_matrices", kAllLanes), r(r), row(row), transposed(transposed) {
        cuda_host::require_aligned(row, "load_matrices");
        cuda_host::races::reads(row, 16);
    }
    void run(Collective* const* lanes) override {
        uint16_t numbers[32][8];
        for (int i = 0; i < 32; ++i) {
            if (lanes[i] == nullptr) cuda_host::die("load_matrices: lane %d is not there", i);
            memcpy(numbers[i], static_cast<LoadMatrices*>(lanes[i])->row, 16);
        }
        for (int i = 0; i < 32; ++i) {
            const int group = i / 4, pair = i % 4 * 2;
            const LoadMatrices& to = static_cast<LoadMatrices&>(*lanes[i]);
            for (int m = 0; m < 4; ++m) {
                const uint16_t* const own = numbers[8 * m + group] + pair;
                to.r[m] = to.transposed
                              ? numbers[8 * m + pair][group] | numbers[8 * m + pair + 1][group] << 16
                              : own[0] | uint32_t{own[1]} << 16;
            }
        }
    }
    uint32_t* r;
    const void* row;
    bool transposed;
};

/// As tensor cores round sums: towards 0.
inline float truncated(double x) {
    const float nearest = float(x);
    return std::isfinite(nearest) && std::fabs(nearest) > std::fabs(x) ? std::nextafter(nearest, 0.0f)
                                                                       : nearest;
}

template <float (*number)(uint16_t)>
struct MultiplyAdd final : cuda_host::Collective {
    MultiplyAdd(float* d, const uint32_t* a, uint32_t b0, uint32_t b1)
        : Collective("multiply_add", kAllLanes), d(d), a(a), b{b0, b1} {}
    void run(Collective* const* lanes) override {
        float left[16][16], right[16][8];
        for (int i = 0; i < 32; ++i) {
            if (lanes[i] == nullptr) cuda_host::die("multiply_add: lane %d is not there", i);
            const MultiplyAdd& from = static_cast<MultiplyAdd&>(*lanes[i]);
            const int group = i / 4, pair = i % 4 * 2;
            for (int half = 0; half < 2; ++half) {
                for (int j = 0; j < 4; ++j)
                    left[group + j % 2 * 8][pair + j / 2 * 8 + half] =
                        number(uint16_t(from.a[j] >> 16 * half));
                for (int j = 0; j < 2; ++j)
                    right[pair + j * 8 + half][group] = number(uint16_t(from.b[j] >> 16 * half));
            }
        }
        for (int i = 0; i < 32; ++i) {
            const MultiplyAdd& to = static_cast<MultiplyAdd&>(*lanes[i]);
            for (int j = 0; j < 4; ++j) {
                const int row = i / 4 + j / 2 * 8, column = i % 4 * 2 + j % 2;
                double sum = to.d[j];
                for (int k = 0; k < 16; ++k) sum += double(left[row][k]) * right[k][column];
                to.d[j] = truncated(sum);
            }
        }
    }
    float* d;
    const uint32_t* a;
    uint32_t b[2];
};

}  // namespace host

inline float power_of_two(float x) { return x < -126 ? 0 : std::exp2(x); }
inline uint32_t and_or(uint32_t x, uint32_t mask, uint32_t bits) { return (x & mask) | bits; }

inline uint32_t multiply_add_f16x2(uint32_t x, uint32_t y, uint32_t z) {
    uint32_t sum = 0;
    for (int i = 0; i < 32; i += 16) {
        const float s = std::fma(host::from_f16(uint16_t(x >> i)), host::from_f16(uint16_t(y >> i)),
                                 host::from_f16(uint16_t(z >> i)));
        sum |= uint32_t{__half_as_ushort(__float2half_rn(s))} << i;
    }
    return sum;
}
inline uint32_t add_f16x2(uint32_t x, uint32_t y) { return multiply_add_f16x2(x, 0x3c003c00, y); }
inline void load_matrices(uint32_t (&r)[4], const void* row) {
    host::LoadMatrices call(r, row, false);
    cuda_host::meet(call);
}
inline void load_matrices_transposed(uint32_t (&r)[4], const void* row) {
    host::LoadMatrices call(r, row, true);
    cuda_host::meet(call);
}
inline void multiply_add_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    host::MultiplyAdd<host::from_f16> call(d, a, b0, b1);
    cuda_host::meet(call);
}
inline void multiply_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    for (float& sum : d) sum = 0;
    multiply_add_f16(d, a, b0, b1);
}
inline void multiply_add_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    host::MultiplyAdd<host::from_bf16> call(d, a, b0, b1);
    cuda_host::meet(call);
}

inline uint32_t multiply_add_pair(uint32_t a, uint32_t b, uint32_t c) {
    const auto one = [](uint16_t x, uint16_t y, uint16_t z) {
        return __half_as_ushort(
            __float2half_rn(std::fma(host::from_f16(x), host::from_f16(y), host::from_f16(z))));
    };
    return one(uint16_t(a), uint16_t(b), uint16_t(c)) |
           uint32_t(one(uint16_t(a >> 16), uint16_t(b >> 16), uint16_t(c >> 16))) << 16;
}

}  // namespace slimrt::cuda
