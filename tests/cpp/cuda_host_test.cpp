// Shows that tests/cuda_host runs kernels as a device would, and notices what it says it notices.
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/ptx_sm90.cuh"

using namespace slimrt::cuda;

namespace {

void check(bool ok, const char* what) {
    if (ok) return;
    std::fprintf(stderr, "cuda_host_test: %s\n", what);
    std::exit(1);
}
void check(cudaError_t error, cudaError_t expected, const char* what) {
    if (error == expected) return;
    std::fprintf(stderr, "cuda_host_test: %s: %s\n", what, cudaGetErrorName(error));
    std::exit(1);
}

/// Device memory with a copy on the host.
template <class T>
struct Array {
    explicit Array(std::vector<T> values) : host(std::move(values)) {
        check(cudaMalloc(&device, bytes()), cudaSuccess, "cudaMalloc");
        check(cudaMemcpy(device, host.data(), bytes(), cudaMemcpyHostToDevice), cudaSuccess, "cudaMemcpy");
    }
    ~Array() { cudaFree(device); }
    size_t bytes() const { return host.size() * sizeof(T); }
    const std::vector<T>& read() {
        check(cudaMemcpy(host.data(), device, bytes(), cudaMemcpyDeviceToHost), cudaSuccess, "cudaMemcpy");
        return host;
    }
    std::vector<T> host;
    T* device = nullptr;
};

template <class... Params, class... Args>
cudaError_t start(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared, unsigned cluster,
                  cudaStream_t stream, Args... args) {
    cudaLaunchAttribute attribute{cudaLaunchAttributeClusterDimension, {{cluster, 1, 1}}};
    const cudaLaunchConfig_t config{grid, block, shared, stream, &attribute, 1};
    return cudaLaunchKernelEx(&config, kernel, args...);
}

// Warp collectives.

__global__ void sums(const float* x, float* out) {
    __shared__ float of_warps[32];
    float sum = x[blockIdx.x * blockDim.x + threadIdx.x];
    for (int bits = 16; bits > 0; bits /= 2) sum += __shfl_xor_sync(~0u, sum, bits);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
    for (unsigned i = 0; i < blockDim.x / 32; ++i) sum += of_warps[i];
    out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

void test_sums() {
    std::vector<float> x(3 * 128);
    for (size_t i = 0; i < x.size(); ++i) x[i] = float(i);
    Array<float> from(x), to(std::vector<float>(x.size()));
    check(start(sums, 3, 128, 0, 1, nullptr, from.device, to.device), cudaSuccess, "sums");
    to.read();
    for (size_t i = 0; i < x.size(); ++i)
        check(to.host[i] == 128.0f * (float(i / 128) * 128 + 63.5f), "a sum over a block");
}

__global__ void lanes(int* out) {
    const int lane = int(threadIdx.x);
    if (lane == 31) return;  // who has exited is not waited for
    out[lane] = lane < 8 ? __shfl_down_sync(0xff, lane, 3, 8) : -1;
    out[32 + lane] = __shfl_sync(0x7fffffff, lane, 5);
    out[64 + lane] = int(__ballot_sync(0x7fffffff, lane % 3 == 0));
    out[96 + lane] = __any_sync(0x7fffffff, lane == 7) + 2 * __all_sync(0x7fffffff, lane < 31);
    __syncthreads();
}

void test_lanes() {
    Array<int> out(std::vector<int>(128));
    check(start(lanes, 1, 32, 0, 1, nullptr, out.device), cudaSuccess, "lanes");
    out.read();
    for (int i = 0; i < 31; ++i) {
        check(out.host[i] == (i >= 8 ? -1 : i + 3 < 8 ? i + 3 : i), "__shfl_down_sync");
        check(out.host[32 + i] == 5, "__shfl_sync");
        check(out.host[64 + i] == 0x49249249, "__ballot_sync");
        check(out.host[96 + i] == 3, "__any_sync and __all_sync");
    }
}

// Products: a [16, 16] times b [16, 8], both from shared memory.

template <bool brain>
__global__ void product(const uint16_t* a, const uint16_t* b, float* out) {
    uint16_t* const shared = reinterpret_cast<uint16_t*>(shared_memory());
    for (int i = int(threadIdx.x); i < 16 * 24; i += 32) shared[i] = i < 256 ? a[i] : b[i - 256];
    __syncwarp();
    const int lane = int(threadIdx.x);
    uint32_t left[4], right[4];
    load_matrices(left, shared + lane % 16 * 16 + lane / 16 * 8);
    load_matrices_transposed(right, shared + 256 + lane % 16 * 8);  // the second half again: unused
    float d[4] = {1, 1, 1, 1};
    if (brain)
        multiply_add_bf16(d, left, right[0], right[1]);
    else
        multiply_add_f16(d, left, right[0], right[1]);
    for (int j = 0; j < 4; ++j) out[(lane / 4 + j / 2 * 8) * 8 + lane % 4 * 2 + j % 2] = d[j];
}

template <bool brain>
void test_product() {
    std::vector<uint16_t> a(256), b(128);
    const auto number = [](uint16_t bits) { return brain ? from_bf16(bits) : from_f16(bits); };
    const auto bits = [](float x) { return brain ? to_bf16(x) : to_f16(x); };
    for (int i = 0; i < 256; ++i) a[i] = bits(std::sin(float(i)));
    for (int i = 0; i < 128; ++i) b[i] = bits(std::cos(3 * float(i)));
    Array<uint16_t> left(a), right(b);
    Array<float> out(std::vector<float>(128));
    check(start(product<brain>, 1, 32, 768, 1, nullptr, left.device, right.device, out.device), cudaSuccess,
          "product");
    out.read();
    for (int row = 0; row < 16; ++row) {
        for (int column = 0; column < 8; ++column) {
            double sum = 1;
            for (int k = 0; k < 16; ++k) sum += double(number(a[row * 16 + k])) * number(b[k * 8 + column]);
            // 16 products and 17 sums in f32, of magnitudes below 17, rounded towards 0
            const float got = out.host[row * 8 + column];
            check(std::abs(got - sum) < 17 * 17 * 0x1p-24, "a product of matrices");
            check(std::abs(got) <= std::abs(sum), "the sums of a product are truncated");
        }
    }
}

// Copies in the background.

__global__ void background(const float4* from, float4* out) {
    float4* const shared = reinterpret_cast<float4*>(shared_memory());
    copy16(shared, from);
    commit_copies();
    copy16(shared + 1, from + 1, false);
    commit_copies();
    out[0] = shared[0];
    wait_copies<1>();
    out[1] = shared[0];
    out[2] = shared[1];
    wait_copies<0>();
    out[3] = shared[1];
}

void test_background() {
    Array<float> from({1, 2, 3, 4, 5, 6, 7, 8}), out(std::vector<float>(16));
    check(start(background, 1, 1, 32, 1, nullptr, reinterpret_cast<const float4*>(from.device),
                reinterpret_cast<float4*>(out.device)),
          cudaSuccess, "background");
    out.read();
    check(std::isnan(out.host[0]), "a copy that has not been waited for");
    check(out.host[4] == 1 && out.host[7] == 4, "a copy that has been waited for");
    check(std::isnan(out.host[8]) && out.host[12] == 0, "zeros instead of a copy");
}

// A cluster: every block copies a row and writes it to its neighbour, round after round.

__global__ void ring(const float* from, float* out, int rounds) {
    float *const own = reinterpret_cast<float*>(shared_memory()), *const theirs = own + 64;
    uint64_t *const full = reinterpret_cast<uint64_t*>(theirs + 64), *const sent = full + 1;
    const uint32_t rank = cluster_rank(), size = gridDim.x, before = (rank + size - 1) % size;
    if (threadIdx.x == 0) {
        barrier_init(full, 1);
        barrier_init(sent, 1);
        barrier_init_done();
    }
    cluster_sync();
    float sum = 0;
    for (int round = 0; round < rounds; ++round) {
        const uint32_t parity = uint32_t(round) & 1;
        if (threadIdx.x == 0) {
            barrier_arrive_expect(full, 256);
            copy_bulk(own, from + (round * size + rank) * 64, 256, full);
        }
        barrier_wait(full, parity);
        // Half of it in words of 16 bytes, half in words of 4; perhaps before who gets them expects any.
        if (threadIdx.x < 8)
            store_async(theirs + 4 * threadIdx.x, reinterpret_cast<const uint4*>(own)[threadIdx.x], sent,
                        before);
        if (threadIdx.x >= 32)
            store_async(theirs + threadIdx.x, __float_as_uint(own[threadIdx.x]), sent, before);
        if (threadIdx.x == 40) barrier_arrive_expect(sent, 256);
        barrier_wait_block(sent, parity);
        sum += theirs[threadIdx.x];
        cluster_sync();
    }
    out[rank * 64 + threadIdx.x] = sum;
}

/// What is stored in the background is not there before it is waited for.
__global__ void early(float* out) {
    uint64_t* const barrier = reinterpret_cast<uint64_t*>(shared_memory());
    float* const to = reinterpret_cast<float*>(barrier + 2);
    barrier_init(barrier, 1);
    store_async(to, __float_as_uint(7.0f), barrier, 0);
    out[0] = *to;
    barrier_arrive_expect(barrier, 4);
    barrier_wait_block(barrier, 0);
    out[1] = *to;
}

void test_early() {
    Array<float> out(std::vector<float>(2));
    check(start(early, 1, 1, 64, 1, nullptr, out.device), cudaSuccess, "early");
    out.read();
    check(std::isnan(out.host[0]) && out.host[1] == 7, "a store in the background");
}

void test_ring() {
    constexpr int kSize = 4, kRounds = 5;
    std::vector<float> x(kRounds * kSize * 64);
    for (size_t i = 0; i < x.size(); ++i) x[i] = float(i * i % 101);
    Array<float> from(x), out(std::vector<float>(kSize * 64));
    check(start(ring, kSize, 64, 512 + 16, kSize, nullptr, from.device, out.device, kRounds), cudaSuccess,
          "ring");
    out.read();
    for (int rank = 0; rank < kSize; ++rank) {
        for (int i = 0; i < 64; ++i) {
            float sum = 0;
            for (int round = 0; round < kRounds; ++round)
                sum += x[(round * kSize + (rank + 1) % kSize) * 64 + i];
            check(out.host[rank * 64 + i] == sum, "a sum over a cluster");
        }
    }
}

// Streams, graphs, limits.

__global__ void add_to(const float* step, float* to) { *to += *step; }

void test_graph() {
    Array<float> step({1}), to({0});
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess, "cudaStreamCreate");
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess, "cudaStreamBeginCapture");
    check(start(add_to, 1, 1, 0, 1, stream, step.device, to.device), cudaSuccess, "captured launch");
    check(start(add_to, 1, 1, 0, 1, stream, step.device, to.device), cudaSuccess, "captured launch");
    void* p;
    check(cudaMalloc(&p, 1), cudaErrorStreamCaptureUnsupported, "cudaMalloc in a capture");
    check(cudaStreamSynchronize(stream), cudaErrorStreamCaptureUnsupported, "waiting in a capture");
    check(cudaStreamEndCapture(stream, &graph), cudaSuccess, "cudaStreamEndCapture");
    check(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess, "cudaGraphInstantiate");
    check(cudaGraphDestroy(graph), cudaSuccess, "cudaGraphDestroy");
    check(cudaStreamSynchronize(stream), cudaSuccess, "cudaStreamSynchronize");
    check(to.read()[0] == 0, "what is captured has run");
    float* pinned;
    check(cudaMallocHost(&pinned, sizeof(float)), cudaSuccess, "cudaMallocHost");
    for (const float now : {10.0f, 100.0f}) {
        *pinned = now;
        check(cudaMemcpyAsync(step.device, pinned, sizeof(float), cudaMemcpyHostToDevice, stream),
              cudaSuccess, "copy");
        check(cudaGraphLaunch(exec, stream), cudaSuccess, "cudaGraphLaunch");
        check(cudaStreamSynchronize(stream), cudaSuccess, "cudaStreamSynchronize");
    }
    check(to.read()[0] == 220, "a graph that runs twice");
    check(cudaFreeHost(pinned), cudaSuccess, "cudaFreeHost");
    check(cudaGraphExecDestroy(exec), cudaSuccess, "cudaGraphExecDestroy");
    check(cudaStreamDestroy(stream), cudaSuccess, "cudaStreamDestroy");
}

void test_limits() {
    float* none = nullptr;
    const float* nothing = nullptr;
    check(start(add_to, 1, 1025, 0, 1, nullptr, nothing, none), cudaErrorInvalidConfiguration,
          "1025 threads");
    check(start(add_to, 0, 1, 0, 1, nullptr, nothing, none), cudaErrorInvalidConfiguration, "no blocks");
    check(start(add_to, 3, 1, 0, 2, nullptr, nothing, none), cudaErrorInvalidValue, "half a cluster");
    check(start(add_to, 16, 1, 0, 16, nullptr, nothing, none), cudaErrorInvalidValue, "a cluster of 16");
    check(start(add_to, 1, 1, 46000, 1, nullptr, nothing, none), cudaErrorInvalidValue,
          "shared memory not asked for, with what a kernel may have besides");
    check(cudaFuncSetAttribute(reinterpret_cast<const void*>(add_to),
                               cudaFuncAttributeMaxDynamicSharedMemorySize, 228 << 10),
          cudaErrorInvalidValue, "too much shared memory");
    setenv("SLIMRT_EMULATED_MEMORY", "100000", 1);
    void *p, *q;
    size_t free = 0, total = 0;
    check(cudaMalloc(&p, 60000), cudaSuccess, "cudaMalloc");
    check(cudaMalloc(&q, 60000), cudaErrorMemoryAllocation, "more memory than there is");
    check(cudaMemGetInfo(&free, &total), cudaSuccess, "cudaMemGetInfo");
    check(free == 40000 && total == 100000, "what is left of memory");
    check(cudaFree(p), cudaSuccess, "cudaFree");
    check(cudaMemcpy(&p, &q, sizeof p, cudaMemcpyHostToDevice), cudaErrorInvalidValue,
          "host memory as device memory");
    unsetenv("SLIMRT_EMULATED_MEMORY");
    cudaGetLastError();
}

// What ends the process. Each kernel is wrong in its own way.

__global__ void apart() {
    if (threadIdx.x < 32)
        __syncthreads();
    else
        __shfl_xor_sync(~0u, 1, threadIdx.x == 40 ? 1 : 2);
    if (threadIdx.x >= 32) __syncwarp(threadIdx.x == 40 ? 0xffff : ~0u);
}
__global__ void foreign_lane(int* out) {
    if (threadIdx.x < 16) *out = __shfl_sync(0xffff, 1, 20);
}
__global__ void crooked(const float* from) { copy16(shared_memory() + 4, from); }
__global__ void unwaited(const float* from) {
    uint64_t* const barrier = reinterpret_cast<uint64_t*>(shared_memory());
    barrier_init(barrier, 1);
    barrier_arrive_expect(barrier, 16);
    copy_bulk(barrier + 2, from, 16, barrier);
}
__global__ void unwaited_store() {
    uint64_t* const barrier = reinterpret_cast<uint64_t*>(shared_memory());
    barrier_init(barrier, 1);
    barrier_arrive_expect(barrier, 4);
    store_async(barrier + 2, 1u, barrier, 0);
}
/// Each thread gets the number of one of another warp, in order if they wait for each other.
__global__ void exchange(int* out, bool wait) {
    int* const numbers = reinterpret_cast<int*>(shared_memory());
    numbers[threadIdx.x] = int(threadIdx.x);
    if (wait) __syncthreads();
    out[threadIdx.x] = numbers[threadIdx.x ^ 32];
}
__global__ void uninitialised() { barrier_wait(reinterpret_cast<uint64_t*>(shared_memory()), 0); }

/// Launched so that it may begin before the kernel before has ended.
cudaError_t start_early(void (*kernel)(const float*, float*), const float* x, float* out) {
    cudaLaunchAttribute attribute{cudaLaunchAttributeProgrammaticStreamSerialization, {}};
    attribute.val.programmaticStreamSerializationAllowed = 1;
    const cudaLaunchConfig_t config{1, 32, 0, nullptr, &attribute, 1};
    return cudaLaunchKernelEx(&config, kernel, x, out);
}
__global__ void in_turn(const float* x, float* out) {
    wait_for_previous();
    out[threadIdx.x] = x[threadIdx.x];
}
__global__ void out_of_turn(const float* x, float* out) {
    if (threadIdx.x == 7) return;
    in_turn(x, out);
}

/// Runs fn in a process of its own; it must abort and say all of this.
template <class Fn>
void check_dies(const char* name, const std::vector<std::string>& words, const Fn& fn) {
    int ends[2];
    check(pipe(ends) == 0, "pipe");
    const pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        fn();
        cudaDeviceSynchronize();
        _exit(0);
    }
    close(ends[1]);
    std::string said;
    char buffer[4096];
    for (ssize_t n; (n = ::read(ends[0], buffer, sizeof buffer)) > 0;) said.append(buffer, size_t(n));
    close(ends[0]);
    int status = 0;
    waitpid(child, &status, 0);
    check(WIFSIGNALED(status) || WEXITSTATUS(status) != 0, name);
    for (const std::string& word : words)
        check(said.find(word) != std::string::npos,
              (name + (" does not say " + word) + " but " + said).c_str());
}

void test_deaths() {
    Array<float> x(std::vector<float>(64));
    Array<int> out({0});
    check_dies(
        "a deadlock",
        {"deadlock", "block (1, 0, 0)", "in __syncthreads: threads 0 1 2",
         "in __syncwarp of lanes 0xffff: threads 40", "in __syncwarp of lanes 0xffffffff: threads 32 33"},
        [&] { start(apart, 2, 64, 0, 2, nullptr); });
    check_dies("a lane outside the mask", {"block (0, 0, 0), thread (", "reads lane 20"},
               [&] { start(foreign_lane, 1, 32, 0, 1, nullptr, out.device); });
    check_dies("a crooked address", {"copy16", "no multiple of 16"},
               [&] { start(crooked, 1, 1, 64, 1, nullptr, x.device); });
    check_dies("a copy nobody waits for", {"nobody has waited for"},
               [&] { start(unwaited, 1, 1, 64, 1, nullptr, x.device); });
    check_dies("a store nobody waits for", {"nobody has waited for"},
               [&] { start(unwaited_store, 1, 1, 64, 1, nullptr); });
    check_dies("a barrier without initialisation", {"not been initialised"},
               [&] { start(uninitialised, 1, 1, 64, 1, nullptr); });
    check_dies("the host in device memory", {},
               [&] { *static_cast<volatile float*>(x.device) = 1; });  // from the host
    Array<int> numbers(std::vector<int>(64));
    check(start(exchange, 1, 64, 64 * 4, 1, nullptr, numbers.device, true), cudaSuccess, "exchange");
    check(numbers.read()[1] == 33, "a number of another warp");
    if (cuda_host::races::are_found())
        check_dies("a race", {"data race", "exchange"},
                   [&] { start(exchange, 1, 64, 64 * 4, 1, nullptr, numbers.device, false); });
    check(start_early(in_turn, x.device, x.device + 32), cudaSuccess, "in turn");
    check(cudaDeviceSynchronize(), cudaSuccess, "a kernel that waits for the one before");
    check_dies("a thread that does not wait for the kernel before", {"wait_for_previous"},
               [&] { start_early(out_of_turn, x.device, x.device + 32); });
    check_dies("an access behind an allocation", {},
               [&] { start(add_to, 1, 1, 0, 1, nullptr, x.device, x.device + 64); });
}

// Conversions.

void test_numbers() {
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
        const float x = from_f16(uint16_t(bits));
        check(std::isnan(x) || to_f16(x) == bits, "a half number there and back");
    }
    check(to_f16(65519.996f) == 0x7bff && to_f16(65520) == 0x7c00 && to_f16(-1e30f) == 0xfc00,
          "large halves");
    check(to_f16(1 + 0x1p-11f) == 0x3c00 && to_f16(1 + 3 * 0x1p-11f) == 0x3c02, "halves between two");
    check(to_f16(0x1p-25f) == 0 && to_f16(0x1.1p-25f) == 1 && to_f16(0x1.ffffp-15f) == 0x400, "small halves");
    check(to_bf16(1 + 0x1p-8f) == 0x3f80 && to_bf16(1 + 3 * 0x1p-8f) == 0x3f82, "bf16 between two");
    check(std::isnan(from_bf16(to_bf16(NAN))) && std::isnan(from_f16(to_f16(NAN))), "NaN");
    check(__dp4a(0x01ff7f80, 0x02030405, 7) == 7 + 2 - 3 + 127 * 4 - 128 * 5, "__dp4a");
    check(__byte_perm(0x33221100, 0x77665544, 0x7052) == 0x77005522, "__byte_perm");
    check(__float2int_rn(2.5f) == 2 && __float2int_rn(-3.5f) == -4 && __float2int_rn(NAN) == 0,
          "__float2int_rn");
}

}  // namespace

int main() {
    test_numbers();
    for (const char* const seed : {"1", "2", "3"}) {
        setenv("SLIMRT_EMULATED_SEED", seed, 1);
        test_sums();
        test_lanes();
        test_product<false>();
        test_product<true>();
        test_background();
        test_ring();
        if (!cuda_host::races::are_found()) test_early();  // which reads too soon, on purpose
        test_graph();
    }
    test_limits();
    test_deaths();
    std::puts("cuda_host_test: ok");
}
