// Vector types, aligned as the device needs them.
#pragma once

#define CUDA_HOST_VECTORS(T, name)                                                     \
    struct alignas(2 * sizeof(T)) name##2 { T x, y; };                                 \
    struct name##3 { T x, y, z; };                                                     \
    struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) name##4 { T x, y, z, w; }; \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; }                         \
    inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                 \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
CUDA_HOST_VECTORS(signed char, char)
CUDA_HOST_VECTORS(unsigned char, uchar)
CUDA_HOST_VECTORS(short, short)
CUDA_HOST_VECTORS(unsigned short, ushort)
CUDA_HOST_VECTORS(int, int)
CUDA_HOST_VECTORS(unsigned, uint)
CUDA_HOST_VECTORS(long long, longlong)
CUDA_HOST_VECTORS(float, float)
CUDA_HOST_VECTORS(double, double)
#undef CUDA_HOST_VECTORS

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
