// Backends by name.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/backend.h"

namespace slimrt {

/// "cpu", an instruction set of it ("avx2"), "cuda" or "cuda:N". Throws Error{unsupported}: there is no such
/// device.
std::unique_ptr<Backend> open_backend(const std::string& device, int n_threads, bool dry = false);

/// Bytes free on a device, or all of a list; 0: unknown. Throws Error{unsupported}: there is none.
uint64_t available_on(const std::string& devices);

/// A device and how many layers it computes.
struct DeviceLayers {
    std::string device;
    int layers;
};

/// Who computes a model's layers, in their order: of "cuda" all; "cpu,cuda=12": the last 12, "cuda:0,cuda:1":
/// as many as its share of the free memory. Devices without a layer are left out. Throws Error{argument}.
std::vector<DeviceLayers> share_layers(const std::string& devices, int n_layers);

}  // namespace slimrt
