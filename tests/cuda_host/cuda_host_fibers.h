// Code with a stack of its own, that stops and goes on. Implemented in fibers.cpp.
#pragma once

#include <cstddef>

namespace cuda_host {

struct Fiber {
    void* stack = nullptr;  // made at first, and kept
    size_t unused = 0;      // bytes at its end
    void *saved = nullptr, *fake = nullptr;
    void* known_as = nullptr;  // to cuda_host_races.h
};

/// The next resume() calls main, which must end with stop_for_good(). False: no memory.
bool prepare(Fiber& fiber, void (*main)());
/// From the host's stack to the fiber, until it stops.
void resume(Fiber& fiber);
/// First of all in a fiber's main.
void started();
/// From the fiber that runs back to the host's stack.
void stop(Fiber& fiber);
/// From the fiber that runs to another: half as far as by the host's stack, and returns go where CPUs expect
/// them.
void stop_for(Fiber& fiber, Fiber& next);
void stop_for_good(Fiber& fiber);

}  // namespace cuda_host
