#include "bench/machine.h"

#include <fstream>
#include <string>
#include <thread>

#include "core/memory_info.h"
#include "core/processors.h"
#include "kernels/cpu/cpu_backend.h"

namespace slimrt::bench {
namespace {

/// A file's first line; "" where there is none.
std::string first_line(const std::string& path) {
    std::string line;
    std::ifstream file(path);
    std::getline(file, line);
    while (!line.empty() && line.back() == '\0') line.pop_back();  // of the device tree
    return line;
}

/// What /proc/cpuinfo says of the first CPU under one of these names.
std::string cpu_name() {
    std::ifstream file("/proc/cpuinfo");
    for (std::string line; std::getline(file, line);)
        for (const char* name : {"model name", "Model", "CPU part", "Hardware"})
            if (line.starts_with(name) && line.find(": ") != std::string::npos)
                return line.substr(line.find(": ") + 2);
    return "";
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
    return {{"board", first_line("/sys/firmware/devicetree/base/model")},
            {"cpu", cpu_name()},
            {"cores", cores()},
            {"available_memory", available_memory()},
            {"kernel", first_line("/proc/version")},
            {"isas", cpu::isa_names()},
            {"isa", cpu::choose_isa("").name},
            {"default_threads", default_threads()}};
}

}  // namespace slimrt::bench
