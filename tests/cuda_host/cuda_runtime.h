// CUDA on the host: the project's .cu files compiled as C++ and run without a device, also under sanitizers.
//
//     g++ -std=c++20 -O1 -x c++ -I tests/cuda_host -I csrc FILE.cu ... tests/cuda_host/*.cpp
//
// This folder comes first among the include paths, so its <cuda_runtime.h>, <cuda_fp16.h>, <cuda_bf16.h> and
// kernels/cuda/ptx*.cuh are found instead of the real ones. Every thread of a block is a fiber (threads.cpp);
// the blocks of a cluster are there at the same time, clusters run one after another, and which of the
// threads that can go on does is drawn by chance. The device is a dull sm_90 of 4 processors (device.cpp).
//
// What it is strict about; it prints where and aborts unless noted otherwise:
//   * threads that wait for each other in vain: who waits for what
//   * warp collectives: lanes outside the mask, lanes that call something else, values of lanes that are not
//     there
//   * dynamic shared memory: as large as asked for and no larger (AddressSanitizer), NaN when a block starts
//   * copies in the background: the target is NaN from the call on, the bytes arrive when they are waited for
//   * addresses that are not multiples of 16 where they must be, or else of what a type asks for: kernels are
//     built with -fsanitize=alignment
//   * streams run when something waits for them, so host memory that is reused too early shows; host code
//     that touches device memory faults at once, and so do accesses beyond an allocation (up to 255 bytes
//     beyond only under AddressSanitizer)
//   * launches beyond a limit and calls that a capture forbids: the error code of CUDA
// Built with ThreadSanitizer (tests/races.sh, cuda_host_races.h) it also finds accesses of two threads that
// no barrier, copy that is waited for or count orders. Blocks that run one after another count as ordered.
// What it cannot show: barriers and fences of too small a scope, host memory read by kernels,
// limits of registers, static shared memory that is read before it is written, races of several streams, any
// speed. Sums of products have another order than the tensor cores'.
//
// Environment: SLIMRT_EMULATED_MEMORY (bytes, 4 GiB), SLIMRT_EMULATED_CAPABILITY (90),
// SLIMRT_EMULATED_PROCESSORS (4), SLIMRT_EMULATED_INTEGRATED (0; 1: the memory is the host's),
// SLIMRT_EMULATED_DRIVER (13000), SLIMRT_EMULATED_NO_GRAPHS (0; 1: of launches that may begin early; 2:
// none), SLIMRT_EMULATED_SEED (of the order of threads), all read when they are needed.
#pragma once

#include "cuda_host_api.h"       // what the host calls
#include "cuda_host_language.h"  // what kernels are written with
