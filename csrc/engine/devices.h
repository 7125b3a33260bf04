// Backends by name.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/backend.h"

namespace slimrt {

/// "cpu", an instruction set of it ("avx2"), "cuda" or "cuda:N". Throws Error{unsupported} for any other
/// device.
std::unique_ptr<Backend> open_backend(const std::string& device, int n_threads, bool dry = false);

/// Free bytes on a device, or on all of a list; 0: unknown. Throws Error{unsupported} for an unknown device.
uint64_t available_on(const std::string& devices);

/// A device and how many layers it computes.
struct DeviceLayers {
    std::string device;
    int layers;
};

/// Divides a model's layers among devices, in order: "cuda" has all; with "cpu,cuda=12" cuda has the last 12;
/// with "cuda:0,cuda:1" each has its share by free memory. Devices without layers are left out. Throws
/// Error{argument}.
std::vector<DeviceLayers> share_layers(const std::string& devices, int n_layers);

}  // namespace slimrt
