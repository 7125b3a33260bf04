// Instructions that CUDA C++ has no words for, one function each. Fragments are laid out as in the PTX ISA
// (mma.m16n8k16: lane = 4 * group + member; a: rows group, group + 8, columns 2 * member, + 8; b: rows 2 *
// member, + 8, column group; d: as a, with 8 columns). tests/cuda_host has a version of this file for the
// host.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <nv/target>

namespace slimrt::cuda {

// A kernel that is launched `early` (device.h) may begin while the previous one in the stream ends.

/// Waits until the previous kernel has ended and its writes are visible. Every thread calls it before it
/// reads or writes what other kernels write or read, since the next kernel relies on it, too. Returns at once
/// before sm_90.
__device__ inline void wait_for_previous() {
    NV_IF_TARGET(NV_PROVIDES_SM_90, (asm volatile("griddepcontrol.wait;" :: : "memory");))
}
/// Lets the next kernel's blocks begin where there is room, as soon as all blocks of this one have called it.
__device__ inline void let_next_begin() {
    NV_IF_TARGET(NV_PROVIDES_SM_90, (asm volatile("griddepcontrol.launch_dependents;" :: : "memory");))
}

/// The block's dynamic shared memory; the only kind that kernels of clusters use.
__device__ inline unsigned char* shared_memory() {
    extern __shared__ __align__(1024) unsigned char slimrt_shared[];
    return slimrt_shared;
}
/// The same right behind static shared memory, which takes all of 1 KB before the other.
__device__ inline unsigned char* shared_memory_behind_static() {
    extern __shared__ __align__(16) unsigned char slimrt_shared_behind_static[];
    return slimrt_shared_behind_static;
}

__device__ inline uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

/// For kernels that have nothing to do before the previous one has ended.
__device__ inline void begin_early() {
    wait_for_previous();
    let_next_begin();
}

// Asynchronous copies of 16 bytes from global to shared memory; zeros where they are not wanted.

__device__ inline void copy16(void* shared, const void* global, bool wanted = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(wanted ? 16 : 0)
                 : "memory");
}
/// The same for the first `bytes` of the 16; zeros for the rest.
__device__ inline void copy_part_of_16(void* shared, const void* global, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(bytes)
                 : "memory");
}
/// Ends a group of copies; all but the last n groups of this thread have arrived after wait_copies<n>().
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int n>
__device__ inline void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory");
}

// Barriers in shared memory. A phase ends when `arrivals` threads have arrived; phases are counted by parity,
// the first is 0.

__device__ inline void barrier_init(uint64_t* barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
                 : "memory");
}
__device__ inline void barrier_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
/// Arrives when all copies that this thread has started are there.
__device__ inline void barrier_arrive_after_copies(uint64_t* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
/// Waits until the phase of this parity has ended.
__device__ inline void barrier_wait(uint64_t* barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
        "@done bra ended;\nnanosleep.u32 20;\nbra again;\nended:\n}" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

// Counters in device memory, for what blocks write there for each other. count_up() after __syncwarp() also
// releases what the other lanes wrote.

__device__ inline void count_up(uint32_t* count) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(count) : "memory");
}
/// Waits for so many counts, and acquires what was written before them.
__device__ inline void count_wait(const uint32_t* count, uint32_t wanted) {
    uint32_t is;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(is) : "l"(count) : "memory");
    while (is < wanted);
}

// Words in device memory that one block sends to others: 32 bits and a tag that tells new from old. They are
// read and written as a whole.

__device__ inline void send_word(uint64_t* to, uint32_t data, uint32_t tag) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(uint64_t{tag} << 32 | data) : "memory");
}
/// The word that is there now; if it has another tag, look again.
__device__ inline uint64_t look_at_word(const uint64_t* from, uint32_t /*tag*/) {
    uint64_t word;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
    return word;
}

/// x & mask | bits.
__device__ inline uint32_t and_or(uint32_t x, uint32_t mask, uint32_t bits) {
    uint32_t both;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(both) : "r"(x), "r"(mask), "r"(bits));
    return both;
}

// Two f16 in a register each: x + y, and x * y + z.

__device__ inline uint32_t add_f16x2(uint32_t x, uint32_t y) {
    uint32_t sum;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(x), "r"(y));
    return sum;
}
__device__ inline uint32_t multiply_add_f16x2(uint32_t x, uint32_t y, uint32_t z) {
    uint32_t sum;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(x), "r"(y), "r"(z));
    return sum;
}

// Matrices of 8 x 8 16-bit numbers: lane l gives the address of row l % 8 of matrix l / 8.

__device__ inline void load_matrices(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}
__device__ inline void load_matrices_transposed(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

/// 2^x to 2 units in the last place; 0 below 2^-126.
__device__ inline float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/// d [16, 8] += a [16, 16] b [16, 8], of f16 and of bf16, summed in f32; and d = a b.
__device__ inline void multiply_add_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ inline void multiply_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %10, %10, %10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}
__device__ inline void multiply_add_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// a * b + c of two f16 each.
__device__ inline uint32_t multiply_add_pair(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

}  // namespace slimrt::cuda
