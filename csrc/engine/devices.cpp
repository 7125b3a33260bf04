#include "engine/devices.h"

#include <algorithm>
#include <charconv>
#include <cmath>
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

/// The devices of a list with their numbers of layers, -1 where none is given.
std::vector<DeviceLayers> read_list(std::string_view list) {
    std::vector<DeviceLayers> all;
    const auto same = [](const std::string& a, const std::string& b) {
        return a == b || (cuda_number(a) && cuda_number(a) == cuda_number(b));  // "cuda" is "cuda:0"
    };
    for (size_t comma = 0; comma != list.npos; list.remove_prefix(comma == list.npos ? 0 : comma + 1)) {
        const std::string_view one = list.substr(0, comma = list.find(','));
        const size_t equals = one.find('=');
        int layers = -1;
        if (equals != one.npos) {
            const char* const end = one.data() + one.size();
            const auto read = std::from_chars(one.data() + equals + 1, end, layers);
            if (read.ec != std::errc{} || read.ptr != end || layers < 0)
                fail(ErrorCode::argument, "device '", one, "': after = comes a number of layers");
        }
        const std::string name(one.substr(0, equals));
        for (const DeviceLayers& other : all)
            if (same(other.device, name)) fail(ErrorCode::argument, "device '", name, "' is named twice");
        all.push_back({name, layers});
    }
    return all;
}

}  // namespace

std::vector<DeviceLayers> share_layers(const std::string& devices, int n_layers) {
    std::vector<DeviceLayers> all = read_list(devices);
    int left = n_layers;
    for (auto one = all.rbegin(); one != all.rend(); ++one)  // the last layers first
        if (one->layers >= 0) left -= one->layers = std::min(one->layers, left);
    double free = 0;
    std::vector<uint64_t> available(all.size(), 0);
    for (size_t i = 0; i < all.size(); ++i)
        if (all[i].layers < 0)
            free += double(available[i] = 1 + (all.size() > 1 ? available_on(all[i].device) : 0));
    if (left > 0 && free == 0)
        fail(ErrorCode::argument, "'", devices, "': ", left, " of ", n_layers, " layers are on no device");
    for (size_t i = 0; i < all.size(); ++i) {
        if (all[i].layers >= 0) continue;
        all[i].layers = std::min(left, int(std::lround(left * double(available[i]) / free)));
        left -= all[i].layers, free -= double(available[i]);
    }
    std::erase_if(all, [](const DeviceLayers& one) { return one.layers == 0; });
    return all;
}

uint64_t available_on(const std::string& devices) {
    uint64_t available = 0;
    for (const DeviceLayers& one : read_list(devices))
        available += open_backend(one.device, 1, true)->available();
    return available;
}

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
