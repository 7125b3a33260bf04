#include "engine/devices.h"

#include <charconv>
#include <optional>
#include <string_view>

#include "core/error.h"
#include "kernels/cpu/isa.h"

namespace slimrt {
namespace {

constexpr std::string_view kCuda = "cuda";

/// The N of "cuda:N", 0 of "cuda".
std::optional<int> cuda_number(std::string_view device) {
    if (!device.starts_with(kCuda)) return {};
    if (device == kCuda) return 0;
    const char* const end = device.data() + device.size();
    int number = 0;
    const bool all =
        device[kCuda.size()] == ':' &&
        std::from_chars(device.data() + kCuda.size() + 1, end, number) == std::from_chars_result{end, {}};
    return all && number >= 0 ? std::optional(number) : std::nullopt;
}

}  // namespace

std::unique_ptr<Backend> open_backend(const std::string& device, int n_threads, bool dry) {
    if (device == "cpu") return open_cpu_backend({.n_threads = n_threads, .dry = dry});
    if (const std::optional<int> number = cuda_number(device)) return open_cuda_backend(*number, dry);
    int n = 0;
    const cpu::Isa* const* isas = cpu::supported_isas(&n);
    std::string known = "cpu, cuda, cuda:1 ...";
    for (int i = 0; i < n; ++i) {
        if (device == isas[i]->name)
            return open_cpu_backend({.n_threads = n_threads, .isa = device, .dry = dry});
        known += concat(i ? ", " : "; of the CPU: ", isas[i]->name);
    }
    fail(ErrorCode::unsupported, "unknown device '", device, "'; there are: ", known);
}

}  // namespace slimrt
