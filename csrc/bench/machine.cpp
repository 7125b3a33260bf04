#include "bench/machine.h"

#include <string>
#include <thread>

#include "core/memory_info.h"
#include "core/processors.h"
#include "core/text_file.h"
#include "kernels/cpu/cpu_backend.h"

namespace slimrt::bench {
namespace {

/// The device tree's name of it, which ends with a zero.
std::string board() { return first_line("/sys/firmware/devicetree/base/model").c_str(); }

/// What /proc/cpuinfo says of the first CPU under one of these names.
std::string cpu_name() {
    const std::string text = '\n' + text_of("/proc/cpuinfo");
    size_t first = text.size();
    for (const char* name : {"\nmodel name", "\nModel", "\nCPU part", "\nHardware"})
        first = std::min(first, text.find(name));
    const size_t end = text.find('\n', first + 1), colon = text.find(": ", first);
    return colon < end ? text.substr(colon + 2, end - colon - 2) : "";
}

std::vector<Json> cores() {
    std::vector<Json> found;
    for (unsigned i = 0; i < std::thread::hardware_concurrency(); ++i) {
        const std::string cpu = "/sys/devices/system/cpu/cpu" + std::to_string(i) + "/";
        found.push_back(Json{{"capacity", first_line(cpu + "cpu_capacity")},
                             {"max_khz", first_line(cpu + "cpufreq/cpuinfo_max_freq")},
                             {"id", first_line(cpu + "regs/identification/midr_el1")}});
    }
    return found;
}

}  // namespace

Json machine() {
    return {{"board", board()},
            {"cpu", cpu_name()},
            {"cores", cores()},
            {"available_memory", available_memory()},
            {"kernel", first_line("/proc/version")},
            {"isas", cpu::isa_names()},
            {"isa", cpu::choose_isa("").name},
            {"default_threads", default_threads()}};
}

}  // namespace slimrt::bench
