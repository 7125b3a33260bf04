// Backends by name.
#pragma once

#include <memory>
#include <string>

#include "kernels/backend.h"

namespace slimrt {

/// "cpu", an instruction set of it ("avx2"), "cuda" or "cuda:N". Throws Error{unsupported}: there is no such
/// device.
std::unique_ptr<Backend> open_backend(const std::string& device, int n_threads, bool dry = false);

}  // namespace slimrt
