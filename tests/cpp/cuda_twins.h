// The same bytes in host and in device memory, and tensors of them; for cuda_rows_test.cpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "core/tensor.h"
#include "kernels/cuda/kernels.h"

namespace cuda_twins {

using namespace slimrt;
using cuda::check;

inline std::mt19937 chance(1);

/// The same bytes in host and in device memory.
struct Twin {
    std::vector<std::byte> host;
    std::byte* there = nullptr;

    explicit Twin(size_t bytes) : host(bytes) {
        for (std::byte& byte : host) byte = std::byte(chance());
        check(cudaMalloc(reinterpret_cast<void**>(&there), bytes + 1), "cudaMalloc");
        upload();
    }
    Twin(const Twin&) = delete;
    ~Twin() { check(cudaFree(there), "cudaFree"); }
    void upload() {
        check(cudaMemcpy(there, host.data(), host.size(), cudaMemcpyHostToDevice), "cudaMemcpy");
    }
    /// Differences of floats relative to 1 and the larger of both; 0: bytes are compared.
    void compare(float bound, const char* what) const {
        std::vector<std::byte> got(host.size());
        check(cudaMemcpy(got.data(), there, got.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
        check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
        if (std::memcmp(got.data(), host.data(), got.size()) == 0) return;
        size_t bad = 0, first = 0;
        for (size_t i = 0; i + 4 <= got.size(); i += 4) {
            float a, b;
            std::memcpy(&a, &got[i], 4);
            std::memcpy(&b, &host[i], 4);
            const bool same = std::memcmp(&a, &b, 4) == 0 || (std::isnan(a) && std::isnan(b)) ||
                              std::abs(a - b) <= bound * std::max(1.0f, std::abs(b));
            if (same && bound > 0) continue;
            if (std::memcmp(&a, &b, 4) != 0 && bad++ == 0) first = i;
        }
        if (bad == 0 && bound > 0) return;
        uint32_t a, b;
        std::memcpy(&a, &got[first], 4);
        std::memcpy(&b, &host[first], 4);
        std::fprintf(stderr, "cuda_rows_test: %s: %zu words differ, at byte %zu %08x, not %08x\n", what, bad,
                     first, a, b);
        std::exit(1);
    }
};

/// A tensor at both places, `gap` elements between rows, `shift` elements behind an aligned address.
struct Both {
    Tensor here, there;
    Twin twin;

    Both(DType dtype, int64_t rows, int64_t cols, int64_t gap = 0, int64_t shift = 0)
        : twin(row_bytes(dtype, shift) + (row_bytes(dtype, cols) + row_bytes(dtype, gap)) * rows + 16) {
        here = there = Tensor(nullptr, dtype, rows, cols);
        here.stride = there.stride = row_bytes(dtype, cols) + row_bytes(dtype, gap);
        here.data = twin.host.data() + row_bytes(dtype, shift);
        there.data = twin.there + row_bytes(dtype, shift);
    }
};

/// With numbers of many sizes; `odd`: also NaN, infinities, zeros of both signs, in some of the rows.
struct Floats : Both {
    Floats(int64_t rows, int64_t cols, int64_t gap = 0, int64_t shift = 0, bool odd = false)
        : Both(DType::F32, rows, cols, gap, shift) {
        constexpr float kOdd[] = {NAN, INFINITY, -INFINITY, 0.0f, -0.0f, 1e-42f, -3e38f, 65519.0f};
        std::normal_distribution<float> normal;
        for (int64_t i = 0; i < rows; ++i) {
            const float size = odd ? std::exp2(float(int(chance() % 60) - 30)) : 1;
            for (int64_t j = 0; j < cols; ++j) here.f32(i)[j] = size * normal(chance);
            for (int n = odd && cols ? chance() % 4 : 0; n > 0; --n)
                here.f32(i)[chance() % cols] = kOdd[chance() % 8];
            if (odd && i % 5 == 4) std::fill_n(here.f32(i), cols, i % 2 ? -0.0f : float(i));
            if (odd && i % 7 == 6)  // zeros of both signs as the smallest
                for (int64_t j = 0; j < cols; ++j) here.f32(i)[j] = chance() % 2 ? 0.0f : -0.0f;
        }
        twin.upload();
    }
};

struct Ints : Both {
    explicit Ints(const std::vector<int32_t>& values) : Both(DType::I32, 1, int64_t(values.size())) {
        if (!values.empty()) std::memcpy(here.data, values.data(), values.size() * 4);
        twin.upload();
    }
};

}  // namespace cuda_twins
